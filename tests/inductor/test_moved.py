"""The bytes moved in the report are the bytes that a rank receives from its peers, on every path."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from symm_overlap.collective.exchange.c10d import _Collectives
from symm_overlap.inductor.choices import Choices, checked_settings
from symm_overlap.inductor.custom_pass import OverlapPass
from symm_overlap.inductor.report import clear, recorded
from symm_overlap.plan import Plan, Step, Table
from symm_overlap.settings import transformed
from tests.collective.test_fake_group import fake_group
from tests.inductor.cases import New, Program, gather, reduce, scatter
from tests.inductor.scaled_cases import multiplied, quantised, scaled
from tests.inductor.tracing import inputs_of, overlapped, traced
from tests.ranks import Pool, Rank
from tests.transforms import comparing, in_place, one_shot

PROGRAMS: dict[str, tuple[Program, Callable[[int], int]]] = {}
"""Programs of one collective in float32. Each has a function from the world size to the bytes that a rank receives."""


def moves(nbytes: Callable[[int], int]) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        PROGRAMS[program.__name__] = program, nbytes
        return program

    return add


@moves(lambda w: (w - 1) * 4 * 6 * 4)
def a_gather(world: int, name: str, new: New) -> Any:
    return gather(new(4, 6), world, name) @ new(6, 5)


@moves(lambda w: (w - 1) * 2 * 4 * 6 * 4)
def a_gather_in_dim_1_for_a_gradient(world: int, name: str, new: New) -> Any:
    whole = torch.cat(gather(new(2, 4, 6), world, name).split(2), 1).view(-1, 6)
    return whole.t() @ new(2 * 4 * world, 3)


@moves(lambda w: (w - 1) * 4 * 16 + (w - 1) * 4)  # float8, and one float32 of every rank
def a_gather_that_is_quantised(world: int, name: str, new: New) -> Any:
    whole = gather(new(4, 16), world, name)
    return multiplied(new, *quantised(whole, whole.abs().max()))


@moves(lambda w: (w - 1) * 4 * 5 * 2)  # bfloat16
def a_product_that_is_cast_before_it_is_scattered(world: int, name: str, new: New) -> Any:
    return scatter((new(4 * world, 6).bfloat16() @ new(6, 5).bfloat16()).float(), world, name)


@moves(lambda w: (w - 1) * 4 * 5 * (2 + 4))  # bfloat16, and the sums in float32
def a_product_that_is_cast_before_it_is_reduced(world: int, name: str, new: New) -> Any:
    return reduce((new(4 * world, 6).bfloat16() @ new(6, 5).bfloat16()).float(), name)


@moves(lambda w: (w - 1) * 4 * 5 * 4)
def products_that_are_cast_before_they_are_added(world: int, name: str, new: New) -> Any:
    products = [(new(4 * world, 6).bfloat16() @ new(6, 5).bfloat16()).float() for _ in range(2)]
    return scatter(products[0] + products[1], world, name)


@moves(lambda w: (w - 1) * 4 * 16 * 2)  # float16
def a_gather_that_is_cast(world: int, name: str, new: New) -> Any:
    return gather(new(4, 16), world, name).half() @ new(16, 5).half()


@moves(lambda w: (w - 1) * 4 * 5 * 4)
def a_scatter(world: int, name: str, new: New) -> Any:
    return scatter(new(4 * world, 6) @ new(6, 5) + new(4 * world, 3) @ new(3, 5), world, name)


@moves(lambda w: (w - 1) * 4 * 4 * 4)
def a_scatter_of_scaled_matmuls(world: int, name: str, new: New) -> Any:
    return scatter(scaled(new, 4 * world, 16, 4) + scaled(new, 4 * world, 16, 4), world, name)


WAYS = [("sequential", None), ("pipelined", 1), ("pipelined", 2), ("c10d", None), ("c10d", 2)]


class Received:
    """Counts the bytes that are read from peers, and the bytes that torch.distributed receives from them."""

    def __init__(self, me: Rank) -> None:
        self.me, self.nbytes = me, 0

    def count(self, plan: Plan, table: Table) -> Table:
        def counting(carry_out: Any) -> Callable[[Step], object]:
            def counted(step: Step) -> object:
                sources = [region for region in step.reads if region.rank != self.me.rank]
                self.nbytes += sum(carry_out.__self__.at(source).nbytes for source in sources)
                return carry_out(step)

            return counted

        # Copies from peers, and sums that read the peers' memory directly.
        return {kind: counting(run) if kind in ("pull", "reduce") else run for kind, run in table.items()}

    @contextmanager
    def counting(self) -> Iterator[None]:
        all_gather, all_to_all = _Collectives.all_gather, _Collectives.all_to_all

        def gathers(collectives: _Collectives, gathered: Tensor, shard: Tensor) -> Any:
            self.nbytes += gathered.nbytes - shard.nbytes
            return all_gather(collectives, gathered, shard)

        def exchanges(collectives: _Collectives, received: Tensor, sent: Tensor) -> Any:
            self.nbytes += received.nbytes - received.nbytes // self.me.world
            return all_to_all(collectives, received, sent)

        patches = mock.patch.multiple(_Collectives, all_gather=gathers, all_to_all=exchanges)
        with patches, transformed(self.count), in_place(False), comparing(False):
            yield


class Traced:
    """A program, traced once and used for all paths."""

    def __init__(self, me: Rank, program: Program) -> None:
        self.me, self.inputs = me, inputs_of(program, me.world, me.group_name, torch.float32, seed=me.rank)
        self.graph = traced(program, me.world, me.group_name, self.inputs)

    def told_and_received(self, path: str | None, chunks: int | None) -> tuple[int | None, int]:
        graph = copy.deepcopy(self.graph)
        clear()
        OverlapPass(Choices(True, settings=checked_settings(path, chunks, None, None, None, None)))(graph.graph)
        graph.recompile()
        (report,) = recorded().graphs
        (site,) = report.sites
        assert f", {site.moved} bytes moved: fused" in str(site)
        received = Received(self.me)
        with received.counting():
            graph(*self.inputs)
        return site.moved, received.nbytes


def every_program(me: Rank) -> None:
    for name, (program, nbytes) in PROGRAMS.items():
        expected, traced_program = nbytes(me.world), Traced(me, program)
        for way in WAYS:
            assert traced_program.told_and_received(*way) == (expected, expected), f"{name}, {way}"


@pytest.mark.parametrize("world", [2, 3])
def test_the_report_tells_what_a_rank_receives(ranks: Pool, world: int) -> None:
    """The bytes moved in the report equal the bytes that a rank receives."""
    ranks.run(world, every_program)


def reduced(rows: int, bias: bool, products: int = 1) -> Program:
    def program(world: int, name: str, new: New) -> Any:
        if not bias:
            return reduce(sum((new(rows, 6) @ new(6, 5) for _ in range(1, products)), new(rows, 6) @ new(6, 5)), name)
        return reduce(torch.addmm(new(rows, 5), new(rows, 6), new(6, 5)), name)  # this bias is reduced separately

    return program


def all_reduces(me: Rank) -> None:
    """The report shows the bytes of a rank with the largest share. Rank 0 is always one."""
    w = me.world
    for rows, bias, products in (
        (2 * w, False, 1),
        (2 * w + 1, False, 1),
        (1, False, 1),
        (2 * w, True, 1),
        (2 * w, False, 2),
        (2 * w + 1, False, 3),
    ):
        tensors, elements = 2 if bias else 1, 5 * rows
        of_rows = rows * 20 + (w - 2) * -(-rows // w) * 20
        of_vectors = elements * 4 + (w - 2) * min(elements, -(-elements // (4 * w)) * 4) * 4
        of_elements = elements * 4 + (w - 2) * -(-elements // w) * 4
        ways = {
            ("sequential", None, True): tensors * (w - 1) * elements * 4,
            ("sequential", None, False): tensors * of_vectors,
            ("pipelined", 1, True): tensors * of_rows,
            ("pipelined", 2, True): tensors * of_rows,
        }
        if rows % w == 0:  # otherwise, torch.distributed pads the parts of the ranks
            ways["c10d", None, True] = tensors * of_elements
        program = Traced(me, reduced(rows, bias, products))
        for (path, chunks, at_once), nbytes in ways.items():
            with one_shot(at_once):
                told, received = program.told_and_received(path, chunks)
            assert told == nbytes, (rows, path, chunks, at_once)
            assert received == nbytes or (me.rank > 0 and received < nbytes), (rows, path, chunks, at_once)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_an_all_reduce_moves_what_its_path_moves(ranks: Pool, world: int) -> None:
    ranks.run(world, all_reduces)


def test_what_is_skipped_moves_what_torch_moves() -> None:
    """For a skipped collective, the report shows the bytes that torch's collective moves."""

    def program(world: int, name: str, new: New) -> Any:
        largest = reduce(new(6, 4) @ new(4, 5), name, "max")
        return largest, gather(new(4, 6), world, name).relu(), scatter(new(8, 3) @ new(3, 2), world, name, "max")

    with fake_group(4) as group:
        _, report = overlapped(traced(program, 4, group, inputs_of(program, 4, group, torch.float32)))
    expected = {
        "all_reduce": 30 * 4 + 2 * 8 * 4,  # the first rank sums 8 of 30 numbers
        "all_gather_into_tensor": 3 * 24 * 4,
        "reduce_scatter_tensor": 3 * 2 * 2 * 4,
    }
    assert {site.collective: site.moved for site in report.sites} == expected
    assert not report.fused
