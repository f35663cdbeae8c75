"""The rows of an emulated rank: the bounds, and plans that differ only in the order in which work is issued.

Every method has its own lane, and so its own phantoms.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

from torch import Tensor

import symm_overlap
from bench.emulation.contents import Contents, fill
from bench.emulation.phantoms import PhantomMemory
from bench.emulation.rank import EmulatedRank
from bench.harness import NotAvailableError
from bench.harness.case import Case
from bench.harness.launch import Rank
from bench.methods import bounds, ours, published
from bench.methods.method import Method, Prepared
from symm_overlap import _C
from symm_overlap.collective.problem import OPS as OP_KINDS

_Prepare = Callable[[Rank, Case, Tensor, Tensor], Prepared]


def _emulated(rank: Rank) -> EmulatedRank:
    assert isinstance(rank, EmulatedRank)
    return rank


def _with_phantoms(
    me: EmulatedRank,
    case: Case,
    plain: Prepared,
    lane: int,
    around: Callable[[], AbstractContextManager[object]],
) -> Prepared:
    """Prepare a method whose calls use a lane with phantoms that contain the data of the case."""
    loaded: list[Contents] = []  # only the latest contents

    def load(kind: str) -> None:
        with around():
            for _ in range(2):  # one call in each half of the workspace, to learn the places of the data
                plain.call()
        loaded[:] = [Contents(case, kind, me.device)]
        fill(me.state, me.lane(lane), loaded[0], case)

    def poison() -> None:
        for memory in me.phantoms(me.lane(lane)).ranks:
            memory.fill_(0xFF)
        fill(me.state, me.lane(lane), loaded[0], case)

    checked = {"exactly": me.exactly} if me.device.type == "cuda" else {}
    return Prepared(plain.call, plain.results, load, poison, around, choice=plain.choice, **checked)


def _ours(
    lane: int, path: str | None, chunks: int | None = None, span: int | None = None, **environment: str
) -> _Prepare:
    """The public op, on a forced path, or for None on the path that the chooser picks."""

    def prepare(rank: Rank, case: Case, a: Tensor, b: Tensor) -> Prepared:
        me = _emulated(rank)

        @contextmanager
        def around() -> Iterator[None]:
            # On CPU, two streams must be forced. A GPU uses them by default.
            streams = None if path == "sequential" or rank.device.type == "cuda" else 2
            with (
                mock.patch.dict(os.environ, environment),
                symm_overlap.lane(lane),
                symm_overlap.force_path(path, chunks=chunks, streams=streams, span=span),
            ):
                yield

        return _with_phantoms(me, case, ours.call_of(rank, case, a, b, return_A=False), lane, around)

    return prepare


def _memory_waits(rank: Rank, case: Case, a: Tensor, b: Tensor) -> Prepared:
    """Our op with streams that wait by memory operations, without a kernel."""
    if rank.device.type != "cuda":
        raise NotAvailableError("only GPUs have stream memory operations")
    if not _C.has_memory_operations(rank.device.index):
        raise NotAvailableError(
            "the GPU or its driver has no stream memory operations, or CUDA_DEVICE_MAX_CONNECTIONS is below 8"
        )
    return _ours(4, "pipelined", SYMM_OVERLAP_STREAM_WAITS="1")(rank, case, a, b)


def _fused(rank: Rank, case: Case, a: Tensor, b: Tensor) -> Prepared:
    if rank.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise NotAvailableError("on CPU kernels run in Triton's interpreter: set TRITON_INTERPRET=1")
    if not OP_KINDS[case.op].fused:
        raise NotAvailableError("this op has no fused kernel")
    return _ours(5, "fused")(rank, case, a, b)


def _published(rank: Rank, case: Case, a: Tensor, b: Tensor) -> Prepared:
    me = _emulated(rank)
    plain = published.published_call(rank, case, a, b, published.LANE)
    return _with_phantoms(me, case, plain, published.LANE, plain.around)


def copied_bytes(case: Case) -> int:
    """Return the bytes that a rank copies in a call: shards or partial results, and for an all-reduce also sums."""
    columns, times = case.k if case.gathers else case.n, 2 if case.op == "matmul_all_reduce" else 1
    return (case.world - 1) * times * case.rows * columns * case.dtype.itemsize


def _copies(rank: Rank, case: Case, a: Tensor, b: Tensor) -> Prepared:
    """The copies of a call alone: they cross the link one after another."""
    me = _emulated(rank)
    columns, peers = case.k if case.gathers else case.n, range(1, case.world)
    memory = PhantomMemory(case.world, copied_bytes(case) // len(peers), me.device, me.link.on_host)
    sources = [memory.ranks[peer].view(case.dtype).view(-1, columns) for peer in peers]
    moves = [(a.new_empty(case.rows, columns), part) for source in sources for part in source.split(case.rows)]

    def call() -> object:
        for target, source in moves:
            me.copy(target, source)
        return memory

    return Prepared(call, None)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        *(method for method in bounds.METHODS if method.name != "copies"),
        Method("copies", "copies alone", _copies),
        Method("sequential", "copies, then the matmul", _ours(1, "sequential")),
        Method("published", "torch's published plan", _published, ops=("all_gather_matmul", "matmul_reduce_scatter")),
        Method("ours", "ours, as the chooser has it", _ours(6, None)),
        Method("ours_kernel_waits", "ours, kernels wait", _ours(3, "pipelined", SYMM_OVERLAP_STREAM_WAITS="0")),
        Method("ours_memory_waits", "ours, memory operations wait", _memory_waits),
        Method("ours_parts", "ours, a matmul a part", _ours(7, "pipelined", chunks=1)),
        Method("ours_span", "ours, span 4", _ours(8, "pipelined", span=4)),
        Method("ours_fused", "ours, fused", _fused),
    )
}
