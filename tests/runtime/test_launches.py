"""What a GPU would launch: the programs of the ops' plans, issued to a stand-in that only records launches.

The lists in tests/runtime/launches make changes of launches visible in a review. To write them again, run
``python -m tests.runtime.test_launches``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import symm_overlap
from bench.harness.stand_in import StandIn, standing_in
from bench.harness.triton_gpu import beside_a_kernel
from symm_overlap.collective.exchange.planned.reduction import ScatterReduction
from symm_overlap.collective.parts.scattered import ScatteredProducts
from symm_overlap.settings import transformed
from tests.collective.scaled_cases import E4M3, ONE
from tests.runtime.described_calls import all_calls

LISTS = Path(__file__).parent / "launches"
ROWS, K, N = 64, 32, 16

FUSED_LISTED = [*itertools.product(("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"), (2, 8), (1, 2))]

Launch = tuple[str, int, tuple[int, ...]]


def all_gather_matmul(me: StandIn, world: int) -> object:
    return symm_overlap.all_gather_matmul(torch.empty(ROWS, K), [torch.empty(K, N)], 0, me.group, return_A=False)


def all_gather_matmul_last(me: StandIn, world: int) -> object:
    return symm_overlap.all_gather_matmul(torch.empty(ROWS, K), [torch.empty(K * world, N)], 1, me.group)


def matmul_reduce_scatter(me: StandIn, world: int) -> object:
    return symm_overlap.matmul_reduce_scatter(torch.empty(ROWS * world, K), torch.empty(K, N), "sum", 0, me.group)


def sum_of_products(me: StandIn, world: int) -> object:
    A, B, addend = torch.empty(ROWS * world, K), torch.empty(K, N), torch.empty(ROWS * world, N)
    op = torch.ops.symm_overlap.fused_matmuls_reduce_scatter
    return op([A, A + 1], [B, B + 1], addend, "sum", 0, me.group.group_name, [torch.empty(N), torch.empty(0)])


def all_reduce_of_products(me: StandIn, world: int) -> object:
    A, B, addend = torch.empty(ROWS * world, K), torch.empty(K, N), torch.empty(ROWS * world, N)
    return torch.ops.symm_overlap.fused_matmuls_all_reduce([A, A + 1], [B, B], addend, "sum", me.group.group_name)


def all_gather_weight_matmul(me: StandIn, world: int) -> object:
    X, shard = torch.empty(ROWS, K), torch.empty(K // world, N)
    return symm_overlap.all_gather_weight_matmul(X, shard, 0, me.group)


def all_gather_scaled_matmul(me: StandIn, world: int) -> object:
    A, B = torch.empty(ROWS, K).to(E4M3), torch.empty(N, K).to(E4M3).t()
    return symm_overlap.all_gather_scaled_matmul(A, [B], ONE, [ONE], 0, me.group, return_A=False)


def matmul_all_reduce(me: StandIn, world: int) -> object:
    return symm_overlap.matmul_all_reduce(torch.empty(ROWS * world, K), torch.empty(K, N), "sum", me.group)


OPS: dict[str, Callable[[StandIn, int], object]] = {
    call.__name__: call
    for call in (all_gather_matmul, all_gather_matmul_last, matmul_reduce_scatter, matmul_all_reduce)
}
MORE: dict[str, Callable[[StandIn, int], object]] = {
    call.__name__: call
    for call in (sum_of_products, all_reduce_of_products, all_gather_weight_matmul, all_gather_scaled_matmul)
}
SPANNING = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
LISTED = [
    *itertools.product(SPANNING, (2, 8), (1, 2)),
    *itertools.product(MORE, (2, 8), (1, 2)),
]


def listed(op: str, world: int, chunks: int, path: str = "pipelined", span: int = 1) -> str:
    """Return what rank 0 launches in one call, one launch per line."""
    beside = beside_a_kernel() if path == "fused" else nullcontext()
    with beside, standing_in(0, world, path=path, chunks=chunks, span=span) as me:
        (OPS | MORE)[op](me, world)
        return "".join(f"{stream:9} {what:9} {rest}".rstrip() + "\n" for stream, what, rest in me.launched())


@pytest.mark.parametrize(("op", "world", "chunks"), LISTED)
def test_launches_are_those_of_the_list(op: str, world: int, chunks: int) -> None:
    assert listed(op, world, chunks) == (LISTS / f"{op}_{world}_{chunks}.txt").read_text()


@pytest.mark.parametrize(("op", "world", "chunks"), FUSED_LISTED)
def test_launches_of_fused_calls_are_those_of_the_list(op: str, world: int, chunks: int) -> None:
    """Every step is issued without Python, the kernel too."""
    pytest.importorskip("triton")
    assert listed(op, world, chunks, "fused") == (LISTS / f"fused_{op}_{world}_{chunks}.txt").read_text()


@pytest.mark.parametrize("op", SPANNING)
def test_launches_of_matmuls_that_span_parts_are_those_of_the_list(op: str) -> None:
    assert listed(op, 8, 1, span=4) == (LISTS / f"{op}_8_span_4.txt").read_text()


def launches(op: str, rank: int, world: int, chunks: int, span: int, calls: int = 1) -> list[list[Launch]]:
    """Return the launches of each call."""
    with standing_in(rank, world, chunks=chunks, span=span) as me:
        made = []
        for _ in range(calls):
            OPS[op](me, world)
            made.append(me.taken())
        return made


class Touched(NamedTuple):
    begin: int
    end: int
    writes: bool


def touched(launch: Launch) -> list[Touched]:
    """Return the memory ranges that a launch reads and writes. Factors must be contiguous and float32."""
    what, _, numbers = launch
    if what == "copy":
        to, source, count, nbytes, to_stride, from_stride = numbers
        return [
            Touched(to, to + (count - 1) * to_stride + nbytes, True),
            Touched(source, source + (count - 1) * from_stride + nbytes, False),
        ]
    if what == "multiply":
        out, a, b, rows, columns, inner, _, bias = numbers
        return [
            *([Touched(bias, bias + columns * 4, False)] if bias else []),
            Touched(out, out + rows * columns * 4, True),
            Touched(a, a + rows * inner * 4, False),
            Touched(b, b + inner * columns * 4, False),
        ]
    if what == "sum":
        out, copy, elements, _, *partials = numbers
        written = [Touched(at, at + elements * 4, True) for at in (out, copy) if at]
        return written + [Touched(at, at + elements * 4, False) for at in partials]
    return []


def before_each(made: list[Launch]) -> list[set[int]]:
    """Return, for each launch, the launches that end before it starts, because of stream order or events."""
    last: dict[int, int] = {}  # of each stream
    recorded: dict[int, int] = {}  # of each event
    before: list[set[int]] = []
    for index, (what, stream, numbers) in enumerate(made):
        follows = {last[stream]} if stream in last else set()
        if what == "follow":
            follows.add(recorded[numbers[0]])  # a KeyError means that the event has not been recorded yet
        before.append(follows.union(*(before[earlier] for earlier in follows)))
        last[stream] = index
        if what == "record":
            assert numbers[0] not in recorded, "an event is recorded once in a call"
            recorded[numbers[0]] = index
    return before


EVERY = [*itertools.product(OPS, (2, 3, 8), (1, 2), (1,)), *itertools.product(SPANNING, (3, 8), (1,), (2, 4))]


@pytest.mark.parametrize(
    ("op", "world", "chunks", "span"), [each for each in EVERY if each[0] != "all_gather_matmul_last"]
)
def test_launches_that_touch_the_same_memory_are_ordered(op: str, world: int, chunks: int, span: int) -> None:
    made = launches(op, world // 2, world, chunks, span)[0]
    before = before_each(made)
    memory = [touched(launch) for launch in made]
    pairs = 0
    for later, earlier in itertools.combinations(reversed(range(len(made))), 2):
        for one, other in itertools.product(memory[later], memory[earlier]):
            if (one.writes or other.writes) and one.begin < other.end and other.begin < one.end:
                assert earlier in before[later], f"{made[earlier]} and {made[later]} are not ordered"
                pairs += 1
    assert pairs >= chunks * (world - 1)  # each pull, with the launch that computes with the pulled data


@pytest.mark.parametrize(("op", "world", "chunks", "span"), EVERY)
def test_a_call_is_to_the_caller_like_one_kernel_on_his_stream(op: str, world: int, chunks: int, span: int) -> None:
    """A call starts after all earlier work on the caller's stream. It ends before all later work on that stream."""
    for made in launches(op, 0, world, chunks, span, calls=3):
        before = before_each(made)
        what, stream, outputs = made[-1]
        assert (what, stream) == ("poison", 0)
        assert outputs
        assert before[-1] == set(range(len(made) - 1)), "all launches end before the caller may use the outputs"
        fork = next(index for index, launch in enumerate(made) if launch[0] == "record")
        assert made[fork][1] == 0
        for index, launch in enumerate(made):
            assert launch[1] == 0 or fork in before[index], "a launch starts before the caller's stream is there"


@pytest.mark.parametrize(("op", "world", "chunks", "span"), EVERY)
def test_every_wait_has_its_signal(op: str, world: int, chunks: int, span: int) -> None:
    posts: Counter[tuple[int, int, int]] = Counter()
    waits: Counter[tuple[int, int, int]] = Counter()
    for rank in range(world):
        for what, _, numbers in launches(op, rank, world, chunks, span)[0]:
            if what in ("signal", "wait"):
                channel, *peers = numbers
                for peer in peers:
                    if what == "signal":
                        posts[rank, peer, channel] += 1
                    else:
                        waits[peer, rank, channel] += 1
    assert posts == waits
    assert {source for source, *_ in posts} == set(range(world))


@pytest.mark.parametrize(("op", "world", "chunks", "span"), EVERY)
def test_what_a_peer_has_is_read_behind_a_wait_for_it(op: str, world: int, chunks: int, span: int) -> None:
    """Each copy from a peer's workspace comes after a wait for this peer, and the next copy after the next wait."""
    with standing_in(0, world, chunks=chunks, span=span) as me:
        OPS[op](me, world)
        listed = me.launched()
    before = before_each(launches(op, 0, world, chunks, span)[0])
    awaited = {
        index: rest.partition(" channel")[0].split() for index, (_, what, rest) in enumerate(listed) if what == "wait"
    }
    pulled: Counter[str] = Counter()
    for index, (_, what, rest) in enumerate(listed):
        if what == "copy" and (source := rest.partition("<- workspace@")[2]):
            peer = source.partition("+")[0]
            pulled[peer] += 1
            assert pulled[peer] <= sum(peer in awaited.get(each, ()) for each in before[index])
    assert len(pulled) == world - 1


@pytest.mark.parametrize(("path", "lane"), [("pipelined", 0), ("sequential", 1)])
def test_every_step_of_every_op_is_issued_without_python(path: str, lane: int) -> None:
    with standing_in(1, 2, path=path, chunks=2) as me, symm_overlap.lane(lane):
        for name, call in all_calls(me.group, me.rank, torch.bfloat16).items():
            call()
            made = [what for _, what, _ in me.launched()]
            ends = {"poison"} if path == "pipelined" else {"poison", "meet and sum", "await and gather"}
            assert made[-1] in ends, name
            assert "enter" not in made, name


def nothing_is_described() -> Any:
    """Describe no work as data, so that Python computes everything."""
    return mock.patch.object(ScatterReduction, "work", return_value=None)


def test_python_computes_on_the_stream_of_its_step() -> None:
    with standing_in(0, 2) as me, nothing_is_described():
        found: Any = matmul_reduce_scatter(me, 2)
        made = me.launched()
    entered = [index for index, launch in enumerate(made) if launch[1] == "enter"]
    assert [made[index][0] for index in entered] == ["compute1", "compute0", "compute0"]
    assert made[entered[0] + 1] == ("compute1", "signal", "1 channel 1")
    assert found.shape == (ROWS, N)


def test_after_an_error_what_was_enqueued_is_joined_to_the_callers_stream() -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError("no room")

    with standing_in(0, 2) as me, nothing_is_described(), mock.patch.object(ScatteredProducts, "part", fail):
        with pytest.raises(MemoryError, match="no room") as caught:
            matmul_reduce_scatter(me, 2)
        assert [what for _, what, _ in me.launched()] == ["record", "follow", "enter", "abandon"]
    notes = str(getattr(caught.value, "__notes__", caught.value.args))
    assert "in the plan's step: produce chunk 1.0 on compute1" in notes


def test_with_a_step_transform_the_loop_runs_every_step() -> None:
    """With a step transform, Python runs all steps, so the stand-in gets no launches of steps."""

    def unchanged(plan: object, table: Any) -> Any:
        return table

    with standing_in(0, 2) as me, transformed(unchanged):
        all_gather_matmul(me, 2)
        assert [what for _, what, _ in me.launched()] == ["poison"]


if __name__ == "__main__":
    for case in LISTED:
        (LISTS / "{}_{}_{}.txt".format(*case)).write_text(listed(*case))
    for op in SPANNING:
        (LISTS / f"{op}_8_span_4.txt").write_text(listed(op, 8, 1, span=4))
    for case in FUSED_LISTED:
        (LISTS / "fused_{}_{}_{}.txt".format(*case)).write_text(listed(*case, "fused"))
