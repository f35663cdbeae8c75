"""Run a plan for an op: bind the plan's buffers to tensors and its kinds of step to work, on this lane.

The engine knows neither shapes nor matmuls. An op hands it functions: where a chunk of its input lies, what to do with
a chunk that has come (`consume`), how to compute a chunk that is to go (`produce`). Many weights, gradients and plain
copies are all such functions, so all share this one file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from .. import _C
from ..memory import Lane, aligned
from ..plan import (
    Plan,
    Region,
    Step,
    Table,
    all_gather_consume,
    execute,
    produce_all_reduce,
    produce_reduce_scatter,
)
from .paths import Choice

Chunk = tuple[int, int]
"""(rank that the chunk belongs to, piece of that rank's part)"""

Views = dict[str, Callable[[Region], Tensor]]
"""For each buffer of a plan, the tensor at a region."""

SLEEP_CYCLES = 100  # of the sleep step: enough for the other stream's kernel to be picked first, nothing to a matmul

_dropped: frozenset[str] = frozenset()


@contextmanager
def ablate(*kinds: str) -> Iterator[None]:
    """Leave steps of some kinds out of every call, to measure what they cost; results are then wrong. For benchmarks
    only.

    Args:
        kinds: "waits" (signals and waits), "copies".
    """
    global _dropped
    steps = {"waits": {"signal", "wait"}, "copies": {"publish", "pull", "push"}}
    before, _dropped = _dropped, frozenset().union(*(steps[kind] for kind in kinds))
    try:
        yield
    finally:
        _dropped = before


def bounds(total: int, parts: int) -> list[int]:
    """Where ``parts`` consecutive parts of ``total`` rows begin and end: part i is rows ``bounds[i]`` to ``bounds[i +
    1]``.
    """
    size = -(-total // parts)
    return [min(total, part * size) for part in range(parts + 1)]


def all_gather(
    lane: Lane,
    choice: Choice,
    shard: Tensor,
    gathered: Callable[[int], Tensor] | None,
    consume: Callable[[Chunk, Tensor], object] | None,
    outputs: Sequence[Tensor],
    *,
    accumulate: bool = False,
    at_once: Callable[[list[Tensor]], object] | None = None,
    peer_shards: Callable[[int, int], Tensor] | None = None,
    op: str,
) -> None:
    """Give every rank's shard to ``consume``, chunk by chunk, and keep a copy of all in ``gathered``.

    Args:
        shard: (rows, columns), the own one. Contiguous.
        gathered: rank -> (rows, columns), the place for that rank's shard, when the caller wants them all.
        consume: called as ``consume((rank, piece), rows_of_that_piece)``.
        outputs: what the call writes: poisoned when a wait fails on the GPU.
        accumulate: `consume` adds to one output; its first call, for the own shard, initialises it.
        at_once: in place of ``consume`` and ``gathered``, on CPU: called once with every rank's shard, where it lies.
        peer_shards: (rank, offset) -> that rank's shard, when peers can read it where it is: in symmetric memory, in
            which every rank may have put it at another offset.
    """
    rows, columns = shard.shape
    chunks = choice.chunks if at_once is None else 1
    cut = bounds(rows, chunks)
    unit = aligned((cut[1] - cut[0]) * columns * shard.element_size())
    direct = shard.device.type == "cpu"
    keep = gathered is not None
    place = gathered or _scratch(shard, 0 if direct else lane.world)

    def piece_of(tensor: Tensor, piece: int) -> Tensor:
        return tensor[cut[piece] : cut[piece + 1]]

    def from_gathered(region: Region) -> Tensor:
        rank, piece = divmod(region.start, chunks)
        return piece_of(place(rank), piece)

    workspace = torch.int64.itemsize if peer_shards is not None else unit * chunks
    with lane.call(op, workspace) as parity:

        def offset_of(rank: int) -> Tensor:
            """Where the shard of ``rank`` begins, which it told in its workspace before it signalled."""
            return lane.view(rank, parity, 0, (1,), torch.int64)

        def from_input(region: Region) -> Tensor:
            if peer_shards is None or region.rank == lane.rank:
                return piece_of(shard, region.start)
            return piece_of(peer_shards(region.rank, int(offset_of(region.rank))), region.start)

        if peer_shards is not None:
            offset_of(lane.rank).fill_(int(shard.storage_offset()))
        plan = all_gather_consume(
            lane.rank,
            lane.world,
            chunks=chunks,
            compute=choice.compute,
            copy=choice.copy,
            parity=parity,
            direct=direct,
            keep=keep,
            consume=consume is not None or at_once is not None,
            accumulate=accumulate,
            symmetric=peer_shards is not None,
            at_once=at_once is not None,
            # On a GPU a signal is a kernel, which the own shard's matmul would hold up if it came first.
            outbound=choice.copy if direct else choice.compute[0],
        )

        def from_workspace(region: Region) -> Tensor:
            length = cut[region.start + 1] - cut[region.start]
            return lane.view(region.rank, parity, region.start * unit, (length, columns), shard.dtype)

        views: Views = {"input": from_input, f"workspace{parity}": from_workspace, "gathered": from_gathered}
        table = _table(lane, views)
        if consume is not None:
            table["consume"] = lambda step: consume(cast(Chunk, step.chunk), views[step.reads[0].buffer](step.reads[0]))
        if at_once is not None:
            table["consume"] = lambda step: at_once([views[region.buffer](region) for region in step.reads])
        _run(lane, plan, table, outputs)


def _scratch(shard: Tensor, world: int) -> Callable[[int], Tensor]:
    """Room for the shards of ``world`` ranks, for a plan that copies them although nobody wants the copies."""
    return shard.new_empty(world, *shard.shape).__getitem__


def reduce_scatter(
    lane: Lane,
    choice: Choice,
    produce: Callable[[Chunk, Tensor], object] | None,
    output: Tensor,
    *,
    average: bool,
    at_once: Callable[[Tensor], object] | None = None,
    op: str,
) -> None:
    """Sum what every rank produces for this one, in rank order.

    Args:
        produce: called as ``produce((rank, piece), out)``: write what is for that rank, rows
            ``bounds(rows, chunks)[piece]`` on, to ``out``.
        output: (rows, columns), contiguous; of every rank the same shape.
        at_once: in place of ``produce``: called once with (world * rows, columns), to write what is for every rank.
    """
    cut = bounds(output.shape[0], choice.chunks if at_once is None else 1)
    _reduce(lane, choice, produce, output, cut, [0] * lane.world, average, False, op, at_once)


def all_reduce(
    lane: Lane,
    choice: Choice,
    produce: Callable[[Chunk, Tensor], object],
    output: Tensor,
    *,
    average: bool,
    op: str,
) -> None:
    """Sum what every rank produces, in rank order, for all of them.

    Args:
        produce: called as ``produce((rank, piece), out)``: write rows ``starts(rank) + bounds(part, chunks)[piece]`` on
            to ``out``, where a rank's part is ``bounds(rows, world)``.
        output: (rows, columns), contiguous.
    """
    parts = bounds(output.shape[0], lane.world)
    _reduce(lane, choice, produce, output, bounds(parts[1], choice.chunks), parts, average, True, op)


def _reduce(
    lane: Lane,
    choice: Choice,
    produce: Callable[[Chunk, Tensor], object] | None,
    output: Tensor,
    cut: list[int],
    parts: list[int],
    average: bool,
    everywhere: bool,
    op: str,
    at_once: Callable[[Tensor], object] | None = None,
) -> None:
    """What reduce-scatter and all-reduce share. ``parts[rank]`` is where that rank's part of ``output`` begins."""
    columns, chunks, dtype = output.shape[1], len(cut) - 1, output.dtype
    direct = output.device.type == "cpu"
    unit = cut[1] * columns * output.element_size()
    if at_once is None:
        unit = aligned(unit)  # else the parts of all ranks are one matrix
    units = chunks * lane.world
    # In a half of the workspace: partial sums by the rank they are for, "reduced" by piece, "stage" by the
    # rank they came from.
    reduced_at = aligned(units * unit)
    stage_at = reduced_at + (chunks * unit if everywhere else 0)
    nbytes = stage_at + (0 if direct else units * unit)

    def rows(owner: int, piece: int) -> tuple[int, int]:
        """The rows of ``output`` that a chunk covers; the last ranks' parts may be short or empty."""
        if not everywhere:
            return cut[piece], cut[piece + 1]
        stop = parts[owner + 1]
        return min(stop, parts[owner] + cut[piece]), min(stop, parts[owner] + cut[piece + 1])

    with lane.call(op, nbytes) as parity:
        planner = produce_all_reduce if everywhere else produce_reduce_scatter
        plan = planner(
            lane.rank,
            lane.world,
            chunks=chunks,
            compute=choice.compute,
            copy=choice.copy,
            parity=parity,
            direct=direct,
            **({} if at_once is None else {"at_once": True}),
        )

        def place(region: Region, at: int, owner: int) -> Tensor:
            start, stop = rows(owner, region.start % chunks)
            return lane.view(region.rank, parity, at + region.start * unit, (stop - start, columns), dtype)

        def from_output(region: Region) -> Tensor:
            owner, piece = divmod(region.start, chunks) if everywhere else (lane.rank, region.start)
            start, stop = rows(owner, piece)
            return output[start:stop]

        views: Views = {
            f"workspace{parity}": lambda region: place(region, 0, region.start // chunks),
            "reduced": lambda region: place(region, reduced_at, region.rank),
            "stage": lambda region: place(region, stage_at, lane.rank),
            "output": from_output,
        }

        def reduce(step: Step) -> None:
            targets = [views[region.buffer](region) for region in step.writes]
            sum_partials([views[region.buffer](region) for region in step.reads], average, *targets)

        table = _table(lane, views)
        if produce is not None:
            table["produce"] = lambda step: produce(
                cast(Chunk, step.chunk), views[step.writes[0].buffer](step.writes[0])
            )
        if at_once is not None:
            shape = (lane.world * output.shape[0], columns)
            table["produce"] = lambda step: at_once(lane.view(lane.rank, parity, 0, shape, dtype))
        table["reduce"] = reduce
        _run(lane, plan, table, [output])


def sum_partials(partials: list[Tensor], average: bool, out: Tensor, copy: Tensor | None = None) -> None:
    """out = copy = the sum (or mean) of ``partials``, in their order, accumulated in float32 or wider."""
    if out.numel() == 0:
        return
    if out.device.type == "cuda":
        torch.ops.symm_overlap.reduce_partials(partials, average, out, copy)
        return
    _C.reduce(partials, out, average)
    if copy is not None:
        copy.copy_(out)


def _table(lane: Lane, views: Views) -> dict[str, Callable[[Step], object]]:
    """What the steps of every plan do: copies and meetings."""
    signals = lane.signals
    move = _C.copy if lane.device.type == "cpu" else Tensor.copy_

    def copy(step: Step) -> None:
        source, target = step.reads[0], step.writes[0]
        move(views[target.buffer](target), views[source.buffer](source))

    table: dict[str, Callable[[Step], object]] = {
        "publish": copy,
        "pull": copy,
        "push": copy,
        "signal": lambda step: signals.signal(step.peer, step.channel),  # type: ignore[arg-type]
        "wait": lambda step: signals.wait(step.peer, step.channel),  # type: ignore[arg-type]
    }
    if lane.device.type == "cuda":
        table["sleep"] = lambda step: signals.sleep(SLEEP_CYCLES)  # type: ignore[attr-defined]
    return table


instrument: Callable[[Table, Lane], Table] | None = None
"""Set by tests: replaces the table of every call, for example by one that pauses at random before each step."""


_ORDER_ONLY = frozenset({"fork", "join", "sleep"})
"""Kinds of step that may have nothing to do but to order other steps."""


def _run(lane: Lane, plan: Plan, table: dict[str, Callable[[Step], object]], outputs: Sequence[Tensor]) -> None:
    if unknown := plan.kinds - _ORDER_ONLY - table.keys():  # an executor would pass over a barrier in silence
        raise NotImplementedError(
            f"the plan of {plan.op} has steps of kinds {sorted(unknown)}, which nothing here runs"
        )
    steps: Table = {kind: function for kind, function in table.items() if kind not in _dropped} if _dropped else table
    if instrument is not None:
        steps = instrument(steps, lane)
    execute(plan, steps, lane.streams)
    lane.signals.poison(outputs)
