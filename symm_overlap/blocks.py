"""The ``with`` blocks by which a program sets the settings of its calls."""

from __future__ import annotations

from datetime import timedelta
from numbers import Real

from .settings import PATHS, Block, changed, integer

_LONGEST = 1e9  # seconds, 30 years: far from any overflow


def force_path(
    path: str | None, *, chunks: int | None = None, streams: int | None = None, span: int | None = None
) -> Block:
    """Force a path for the ops called inside the block, instead of the automatic choice.

    Use the same block on every rank. SYMM_OVERLAP_PATH does the same for a whole program.

    Args:
        path: "sequential", "pipelined", "fused" or "c10d". None keeps the automatic choice and overrides only the
            others. With "fused", an op runs as one kernel if there is such a kernel for it; otherwise it takes the
            path "pipelined". On CPU "fused" runs in Triton's interpreter, for tests, and needs TRITON_INTERPRET=1.
        chunks: number of chunks that each rank's part is cut into, at least 1. A part is never cut into more chunks
            than it has rows.
        streams: number of compute streams, 1 or 2. With 2, copies also get a stream of their own.
        span: how many peers' parts one matmul covers at most, at least 1, on the path "pipelined". There are as few
            matmuls as that allows, besides the one of the local part. It excludes more than 1 chunk. On CPU, a gather
            then copies the peers' parts. It has no effect on calls whose parts cannot be next to each other in memory:
            if the last dimension is gathered or scattered, if more than the product of one matmul is summed or kept, or
            if the size of a part is no multiple of 256 bytes.

    Raises:
        ValueError, TypeError: an argument is none of the allowed values.
        RuntimeError: the block is inside a function that is being compiled. Put it around the call of that function.
            Without ``fullgraph=True``, the compiler ends its graph there, and runs the block as it is.
    """
    if path is not None and path not in PATHS:
        raise ValueError(f"force_path({path!r}): allowed are {', '.join(PATHS)}")
    given = {"chunks": chunks, "streams": streams, "span": span}
    chunks, streams, span = (
        None if value is None else integer(f"force_path: {name}", value) for name, value in given.items()
    )
    if chunks is not None and chunks < 1:
        raise ValueError(f"force_path: chunks is {chunks}; allowed are 1 and more")
    if streams not in (None, 1, 2):
        raise ValueError(f"force_path: streams is {streams}; allowed are 1 and 2")
    if span is not None and span < 1:
        raise ValueError(f"force_path: span is {span}; allowed are 1 and more")
    if (span or 1) > 1 and (chunks or 1) > 1:
        raise ValueError(f"force_path: chunks is {chunks} and span is {span}; only one of them may be more than 1")
    return changed("force_path", path=path, chunks=chunks, streams=streams, span=span)


def timeout(seconds: float | timedelta) -> Block:
    """Set the deadline of every wait for a peer inside the block.

    A wait that exceeds its deadline raises `torch.distributed.DistBackendError`. The error names the op, group, rank,
    peer, channel, and the expected and found epoch. Outside of any block the deadline is SYMM_OVERLAP_TIMEOUT seconds,
    by default 300.

    Args:
        seconds: the deadline of one wait, in seconds or as a timedelta; above 0 and up to a billion seconds.

    Raises:
        ValueError: ``seconds`` is not in that range.
        TypeError: ``seconds`` is neither a number nor a timedelta.
        RuntimeError: the block is inside a function that is being compiled. Put it around the call of that function.
            Without ``fullgraph=True``, the compiler ends its graph there, and runs the block as it is.
    """
    given = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
    wrong = f"timeout({seconds!r}): a deadline is a number of seconds above 0 and up to {_LONGEST:.0f}, or a timedelta"
    if not isinstance(given, Real):
        raise TypeError(wrong)
    if not 0 < given <= _LONGEST:
        raise ValueError(wrong)
    return changed("timeout", timeout=float(given))


def lane(index: int) -> Block:
    """Run the ops called inside the block on lane ``index``.

    Ops on different lanes may overlap in time, from several threads or CUDA streams. Ops on one lane run one after
    another, and all ranks must call them in the same order. Outside of any block the lane is 0.

    On CUDA, lanes other than 0 need ranks that can reach each other's memory. Use each lane for the first time (or
    `prepare` it) in the same order on every rank. If ranks call ops on different lanes in different orders, set
    CUDA_DEVICE_MAX_CONNECTIONS=32.

    Args:
        index: any int from 0 on. Ops that belong together must use the same index on every rank.

    Raises:
        ValueError: ``index`` is negative.
        TypeError: ``index`` is not an int.
        RuntimeError: the block is inside a function that is being compiled. Put it around the call of that function.
            Without ``fullgraph=True``, the compiler ends its graph there, and runs the block as it is.
    """
    index = integer("lane: index", index)
    if index < 0:
        raise ValueError(f"lane({index}): lanes are numbered from 0")
    return changed("lane", lane=index)


def sum_order(order: str) -> Block:
    """Set the order in which sums over ranks are computed inside the block.

    Use the same block on every rank. With "rank", ranks are added up in rank order, and every run returns the same bits
    on every path. With "any", a reduction that is not cut into chunks is one collective of the library behind
    torch.distributed (NCCL or gloo): on GPUs, and whenever the call goes through torch.distributed. NCCL's collective
    rounds after every addition, and may return other bits in another run or with another number of nodes. Calls that
    take another path, such as all calls on CPU ranks of one host, add up in rank order in either case.

    Args:
        order: "rank", which is also the order outside of any block, or "any".

    Raises:
        ValueError: ``order`` is neither.
        RuntimeError: the block is inside a function that is being compiled. Put it around the call of that function.
            Without ``fullgraph=True``, the compiler ends its graph there, and runs the block as it is.
    """
    if order not in ("rank", "any"):
        raise ValueError(f"sum_order({order!r}): allowed are 'rank' and 'any'")
    return changed("sum_order", order=order)
