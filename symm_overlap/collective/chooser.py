"""Which path a call takes: one pure function, evaluated alike on every rank, that says why.

``single``
    World size 1: a matmul.
``sequential``
    The whole collective, then one matmul (or the reverse): small problems, where chunks would cost more than they hide.
    On CPU, when the gathered tensor is not wanted, it is never whole: see `symm_overlap.runtime.cpu.sliced_matmul`.
``pipelined``
    Chunks on one or two compute streams and a copy stream, each behind another's matmul.
``fused``
    One kernel, whose tiles wait for the rows that copies bring, or tell the copies which rows are there. Only when it
    is forced.
``c10d``
    Ranks that cannot reach each other's memory: asynchronous collectives of torch.distributed, in chunks where there is
    a matmul to hide behind.

The path is how the work is arranged; the exchange is what carries it out: ``planned`` runs a plan on symmetric memory,
``c10d`` calls torch.distributed, ``single`` has nobody to exchange with, and ``fake`` stands in for peers that do not
exist; ``fused`` launches a kernel. Thresholds are traits of each kind of device
(`symm_overlap.runtime.backend.Traits`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..runtime import TRAITS, Traits
from ..settings import Settings
from .problem import Problem


@dataclass(frozen=True)
class Choice:
    """A path, how it is carried out, and why it was chosen.

    Attributes:
        path: see the module's text.
        exchange: "single", "planned", "fused", "c10d" or "fake".
        chunks: pieces that each rank's part is cut into.
        whole: whether there is one collective and one matmul, with no parts at all.
        one_shot: whether every rank sums all of a small all-reduce, so that ranks meet once and not twice.
        compute: compute streams; the first is the caller's.
        copy: the stream of the copies.
    """

    path: str
    exchange: str
    reason: str
    chunks: int = 1
    whole: bool = False
    one_shot: bool = False
    compute: tuple[str, ...] = ("compute0",)
    copy: str = "compute0"

    def __str__(self) -> str:
        how = " (one shot: every rank sums all of it)" if self.one_shot else ""
        if self.path in ("pipelined", "fused", "c10d") and not self.whole:
            streams = tuple(dict.fromkeys((*self.compute, self.copy)))
            how = f" ({self.chunks} chunk{'s' if self.chunks > 1 else ''} a rank, streams: {', '.join(streams)})"
        return f"{self.path}{how}: {self.reason}"


def choose(problem: Problem, settings: Settings, *, direct: bool, fake: bool = False) -> Choice:
    """The path of a call, with what the caller has forced taken into account.

    Args:
        direct: whether the ranks can reach each other's memory.
        fake: whether nobody is behind the group.

    Raises:
        ValueError: the forced path cannot run here, SYMM_OVERLAP_PATH names none, or there are too many ranks.
    """
    return _choose(problem, settings.forced_path, settings.chunks, settings.streams, settings.lane_index, direct, fake)


@lru_cache(maxsize=4096)
def _choose(
    problem: Problem,
    path: str | None,
    chunks: int | None,
    streams: int | None,
    lane: int,
    direct: bool,
    fake: bool,
) -> Choice:
    if problem.world == 1:
        return Choice("single", "single", "world size 1: there is nobody to communicate with")
    traits = TRAITS[problem.device]
    _require_summable(problem, traits)
    reason = "forced"
    if path in ("pipelined", "fused") and not direct:
        raise ValueError(
            f"the path {path!r} is forced, but these ranks cannot reach each other's memory; allowed here is 'c10d'"
        )
    if path == "fused" and not problem.fusible:
        path, reason = "pipelined", "'fused' is forced, but there is no kernel for this"
    if path is None:
        path, reason = _best(problem, traits, direct)
    whole = path == "sequential"
    if path == "c10d" and chunks is None:
        whole = not problem.sort.multiplies or problem.rows < traits.fewest_rows
    if whole:
        chunks = 1
    elif chunks is None:
        chunks = _chunks(problem, traits, path)
    # A part is never cut into more pieces than it has rows.
    chunks = min(chunks, max(1, problem.rows))
    if path == "fused":
        streams = 1
    elif streams is None or whole:
        streams = 1 if whole else traits.streams
    exchange = "fake" if fake else _exchange(problem, traits, path, lane, direct, reason)
    one_shot = exchange == "planned" and whole and _fits_one_shot(problem, traits)
    side = path == "fused" or (path == "pipelined" and (traits.copy_stream or streams == 2))
    return Choice(
        path,
        exchange,
        reason,
        chunks,
        whole,
        one_shot,
        ("compute0", "compute1")[:streams],
        "copy" if side else "compute0",
    )


def _require_summable(problem: Problem, traits: Traits) -> None:
    most = traits.most_ranks_in_a_sum
    if most is not None and problem.world > most and not problem.sort.gathers:
        raise ValueError(
            f"{problem.op}: on {problem.device.upper()} at most {most} ranks can sum what they have, and there are "
            f"{problem.world}"
        )


def _best(problem: Problem, traits: Traits, direct: bool) -> tuple[str, str]:
    """The path for ranks that are free to choose, and why."""
    rows = problem.rows
    if not direct:
        return "c10d", "the ranks are on several hosts, or cannot map each other's memory"
    if problem.sort.any_rows:
        return _best_for_a_weight(problem, traits)
    if not problem.sort.multiplies:
        if traits.fewest_bytes is None:
            return "sequential", "there is no matmul to hide the collective behind"
        if problem.nbytes < traits.fewest_bytes:
            return "sequential", (
                f"there is no matmul, and {problem.nbytes} bytes a rank are under {traits.fewest_bytes} (an estimate): "
                "the library's own collective is quicker"
            )
        return "pipelined", f"{problem.nbytes} bytes a rank: copy engines move the chunks"
    if rows < traits.fewest_rows:
        return "sequential", (
            f"{rows} rows a rank are under {traits.fewest_rows}: one matmul reads the weight once, not "
            f"{problem.world} times"
        )
    if problem.flop < traits.fewest_flop:
        return "sequential", (
            f"{problem.flop:.1e} FLOP a rank are under {traits.fewest_flop:.1e} (an estimate): one matmul is faster "
            "than what chunks would hide"
        )
    how = "consumed straight out of the peer's memory" if traits.in_place else "enough to hide the copies behind"
    return "pipelined", f"{rows} rows and {problem.flop:.1e} FLOP a rank: {how}"


def _best_for_a_weight(problem: Problem, traits: Traits) -> tuple[str, str]:
    """The path where a weight or its gradient travels, by what is the same on all ranks: its size."""
    if problem.rows < traits.fewest_rows:
        return "sequential", (
            f"{problem.rows} rows of the weight a rank are under {traits.fewest_rows}: one matmul reads what they are "
            f"multiplied with once, not {problem.world} times"
        )
    nbytes = problem.world * problem.nbytes
    if traits.fewest_bytes is not None and nbytes < traits.fewest_bytes:
        return "sequential", (
            f"{nbytes} bytes of the whole weight are under {traits.fewest_bytes} (an estimate): the library's own "
            "collective is quicker"
        )
    return "pipelined", f"{problem.rows} rows and {problem.nbytes} bytes of the weight a rank"


def _chunks(problem: Problem, traits: Traits, path: str) -> int:
    if path == "c10d":
        return 2 if problem.rows >= 2 * traits.fewest_rows else 1
    # The first matmul of a shard can start when half of it is here.
    return 2 if traits.rows_for_two_chunks is not None and problem.rows >= traits.rows_for_two_chunks else 1


def _fits_one_shot(problem: Problem, traits: Traits) -> bool:
    # A rank reads the results of all ranks, instead of its part of each and then the sums of all.
    nbytes = problem.world * problem.m * problem.n * problem.dtype.itemsize
    return problem.sort.replicates and nbytes <= traits.most_bytes_in_one_shot


def _exchange(problem: Problem, traits: Traits, path: str, lane: int, direct: bool, reason: str) -> str:
    if path == "fused":
        return "fused"
    # A small collective of GPUs is the vendor library's business, unless other lanes are in use, of which the library
    # knows nothing.
    if direct and (path == "pipelined" or (path == "sequential" and (not traits.library_collectives or lane > 0))):
        return "planned"
    if lane > 0 and traits.library_collectives:
        raise ValueError(
            f"lane {lane} is in use, but {problem.op} goes through torch.distributed ({path}: {reason}), whose "
            "collectives of one group cannot be in flight side by side: give each thread a process group of its own"
        )
    return "c10d"
