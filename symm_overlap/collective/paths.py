"""Which path a call takes: one pure function, evaluated alike on every rank, that says why.

``single``
    World size 1: a matmul.
``sequential``
    The whole collective, then one matmul (or the reverse): small problems, where chunks would cost more than they hide.
    On CPU, when the gathered tensor is not wanted, it is never whole: see `sliced_matmul`.
``pipelined``
    Chunks on one or two compute streams and a copy stream, each behind another's matmul.
``c10d``
    Ranks that cannot reach each other's memory: chunked asynchronous collectives of torch.distributed.

``fused`` (one persistent kernel that waits for a flag a tile) is not there yet.

The thresholds for CPU come from ``python -m bench.collective_matmul``; those for CUDA are estimates that no GPU has
confirmed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import index

import torch

from ..memory import not_while_compiling

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather", "reduce_scatter", "all_reduce")
PATHS = ("single", "sequential", "pipelined", "c10d")

CPU_CHUNK_ROWS = 256
"""On CPU, below this many rows a chunk's matmul is bound by reading the weight, which every chunk would read again."""

CUDA_CHUNK_ROWS = 256
CUDA_CHUNK_FLOP = 2.5e10
"""On CUDA, below about 35 us a chunk (at 700 TFLOP/s), launches and signals cost more than there is to hide."""


CUDA_REDUCE_RANKS = 256
"""Ranks whose partial results one kernel can sum: their addresses are its argument (kMaxPartials in csrc/cuda)."""


@dataclass(frozen=True)
class Choice:
    """A path, how it is carried out, and why it was chosen."""

    path: str
    reason: str
    chunks: int = 1  # pieces that each rank's part is cut into
    compute: tuple[str, ...] = ("compute0",)  # compute streams; the first is the caller's
    copy: str = "compute0"  # the stream of the copies

    def __str__(self) -> str:
        how = ""
        if self.path in ("pipelined", "c10d"):
            streams = tuple(dict.fromkeys((*self.compute, self.copy)))
            how = f" ({self.chunks} chunk{'s' if self.chunks > 1 else ''} a rank, streams: {', '.join(streams)})"
        return f"{self.path}{how}: {self.reason}"


_forced = threading.local()


@contextmanager
def force_path(path: str | None, *, chunks: int | None = None, streams: int | None = None) -> Iterator[None]:
    """Override the choice for the ops that the calling thread issues inside the block; alike on every rank.

    SYMM_OVERLAP_PATH does the same for a whole program.

    Args:
        path: "sequential", "pipelined" or "c10d"; None keeps the choice and overrides only what follows.
        chunks: pieces that each rank's part is cut into, from 1 on.
        streams: compute streams, 1 or 2; with 2, copies get a stream of their own too.

    Raises:
        ValueError, TypeError: an argument is none of these.
        RuntimeError: the block is inside a compiled function, which would forget it: put it around the call.
    """
    if path is not None and path not in PATHS[1:]:
        raise ValueError(f"force_path({path!r}): allowed are {', '.join(PATHS[1:])}")
    if chunks is not None and index(chunks) < 1:
        raise ValueError(f"force_path: chunks is {chunks}; allowed are 1 and more")
    if streams not in (None, 1, 2):
        raise ValueError(f"force_path: streams is {streams}; allowed are 1 and 2")
    not_while_compiling("force_path")
    before = forced()
    _forced.value = (path, chunks, streams)
    try:
        yield
    finally:
        _forced.value = before


def forced() -> tuple[str | None, int | None, int | None]:
    """What `force_path` has set in the calling thread: path, chunks, streams."""
    value: tuple[str | None, int | None, int | None] = getattr(_forced, "value", (None, None, None))
    return value


def _forced_path() -> str | None:
    """The path that `force_path` or the environment forces."""
    path = forced()[0]
    if path is None:
        path = os.environ.get("SYMM_OVERLAP_PATH") or None
        if path is not None and path not in PATHS[1:]:
            raise ValueError(f"SYMM_OVERLAP_PATH is {path!r}: allowed are {', '.join(PATHS[1:])}")
    return path


def forced_text() -> str:
    """What is forced, for a message; empty where nothing is."""
    _, chunks, streams = forced()
    settings = {"path": _forced_path(), "chunks": chunks, "streams": streams}
    text = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
    return f" with forced {text}" if text else ""


def choose(
    op: str, m: int, n: int, k: int, rows: int, dtype: torch.dtype, world: int, device: str, direct: bool
) -> Choice:
    """The path of a call, with what the caller has forced taken into account.

    Args:
        op: one of `OPS`.
        m, n, k: the whole matmul of one rank, (m, k) @ (k, n): m counts gathered rows; n is the sum over weights. 0
            where there is no matmul.
        rows: rows of the part that belongs to one rank: m / world, or m where the last dimension is shared out.
        world: ranks in the group.
        device: "cpu" or "cuda".
        direct: whether the ranks can reach each other's memory.

    Raises:
        ValueError: the forced path cannot run here, SYMM_OVERLAP_PATH names none, or there are too many ranks.
    """
    _, chunks, streams = forced()
    return _choose(op, m, n, k, rows, dtype, world, device, direct, _forced_path(), chunks, streams)


@lru_cache(maxsize=4096)
def _choose(
    op: str,
    m: int,
    n: int,
    k: int,
    rows: int,
    dtype: torch.dtype,
    world: int,
    device: str,
    direct: bool,
    path: str | None,
    chunks: int | None,
    streams: int | None,
) -> Choice:
    if world == 1:
        return Choice("single", "world size 1: there is nobody to communicate with")
    if device == "cuda" and world > CUDA_REDUCE_RANKS and "reduce" in op:
        raise ValueError(
            f"{op}: on CUDA at most {CUDA_REDUCE_RANKS} ranks can sum what they have, and there are {world}"
        )
    reason = "forced"
    if path == "pipelined" and not direct:
        raise ValueError(
            "the path 'pipelined' is forced, but these ranks cannot reach each other's memory; allowed here is 'c10d'"
        )
    if path is None:
        path, reason = _best(m, n, k, rows, world, device, direct)
    if chunks is None:
        # Two chunks a rank let the first matmul of a shard start when half of it is here. A CPU copies with the core
        # that multiplies.
        chunks = 2 if device == "cuda" and path == "pipelined" and rows >= 4 * CUDA_CHUNK_ROWS else 1
        if path == "c10d":
            chunks = 2 if rows >= 2 * CPU_CHUNK_ROWS else 1
    if streams is None:
        streams = 2 if device == "cuda" else 1
    side = device == "cuda" or streams == 2
    return Choice(path, reason, chunks, ("compute0", "compute1")[:streams], "copy" if side else "compute0")


def _best(m: int, n: int, k: int, rows: int, world: int, device: str, direct: bool) -> tuple[str, str]:
    """The path for ranks that are free to choose, and why."""
    if not direct:
        return "c10d", "the ranks are on several hosts, or cannot map each other's memory"
    if n == 0:
        return "pipelined", "no matmul: one plan moves all chunks"
    if device == "cpu":
        if rows < CPU_CHUNK_ROWS:
            return (
                "sequential",
                f"{rows} rows a chunk are under {CPU_CHUNK_ROWS}: one matmul reads the weight once, not {world} times",
            )
        return "pipelined", f"{rows} rows a chunk: consumed straight out of the peer's memory"
    flop = 2.0 * m * n * k / world
    if rows < CUDA_CHUNK_ROWS or flop < CUDA_CHUNK_FLOP:
        return "sequential", (
            f"a chunk of {rows} rows and {flop:.1e} FLOP is under {CUDA_CHUNK_ROWS} rows or {CUDA_CHUNK_FLOP:.1e} FLOP "
            "(estimates): one matmul is faster than what chunks would hide"
        )
    return "pipelined", f"a chunk of {rows} rows and {flop:.1e} FLOP hides the copy of the next"


def explain(
    op: str,
    *,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    world: int,
    device: str = "cuda",
    direct: bool = True,
    last_dim: bool = False,
) -> Choice:
    """Which path a call would take, and why; ``print`` it. The very function that the ops use.

    Args:
        op: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather", "reduce_scatter" or
            "all_reduce".
        m, n, k: the whole matmul of one rank, (m, k) @ (k, n): m counts gathered rows, n is the sum over weights. Of an
            op without a matmul, n and k are of no account.
        world: ranks in the group.
        device: "cpu" or "cuda".
        direct: whether the ranks can reach each other's memory (one host with peer access).
        last_dim: whether the gather or scatter dimension is the last one, so that every rank has all m rows.

    Raises:
        ValueError: an argument is none of these, or so many ranks cannot sum on CUDA.
    """
    if op not in OPS:
        raise ValueError(f"explain({op!r}): allowed are {', '.join(OPS)}")
    if world < 1 or min(m, n, k) < 0 or device not in ("cpu", "cuda"):
        raise ValueError(
            f"explain: m={m}, n={n}, k={k}, world={world}, device={device!r}: sizes from 0, world from 1, cpu or cuda"
        )
    if not op.startswith("matmul_") and not op.endswith("_matmul"):
        n = k = 0
    rows = m if last_dim else -(-m // world)  # an all-reduce shares out rows that need not divide
    return choose(op, m, n, k, rows, dtype, world, device, direct)
