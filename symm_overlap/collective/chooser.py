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
    is forced, or was measured to be the quickest: it is predicted too, but no GPU has confirmed that yet.
``c10d``
    Ranks that cannot reach each other's memory: asynchronous collectives of torch.distributed, in chunks where there is
    a matmul to hide behind.

The path is how the work is arranged; the exchange is what carries it out: ``planned`` runs a plan on symmetric memory,
``c10d`` calls torch.distributed, ``single`` has nobody to exchange with, and ``fake`` stands in for peers that do not
exist; ``fused`` launches a kernel.

Between ``sequential`` and ``pipelined``, and among numbers of chunks, decides what is known best: what the group has
measured (`symm_overlap.autotune`); else, for a device whose operations have known costs, what a model predicts
(`symm_overlap.collective.prediction`); else measured thresholds. Both are traits of each kind of device
(`symm_overlap.runtime.backend.Traits`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ..runtime import TRAITS, Device, DeviceCosts, GroupState, Traits, costs_of
from ..settings import Settings
from .choice import Choice, Prediction
from .prediction import predict
from .problem import Problem
from .tuned import Tuned, tuned_for

CHUNKS = (1, 2, 4)
"""The numbers of chunks among which a pipelined call chooses."""

CLEARLY, AT_LEAST = 0.95, 0.01
"""A pipelined call must be predicted to take no more than this part of what the plain collective and matmul take, and
to save so many milliseconds: the model errs by some percent, and by some microseconds."""


def choose(
    problem: Problem,
    settings: Settings,
    *,
    direct: bool,
    fake: bool = False,
    device: Device = Device(),  # noqa: B008 (frozen)
    tuned: Tuned | None = None,
) -> Choice:
    """The path of a call, with what the caller has forced taken into account.

    Args:
        direct: whether the ranks can reach each other's memory.
        fake: whether nobody is behind the group.
        device: the ranks' device, on which costs depend; one without a name has those of the best known of its kind.
        tuned: what the group has measured for such calls.

    Raises:
        ValueError: the forced path cannot run here, SYMM_OVERLAP_PATH names none, or there are too many ranks.
    """
    forced = settings.forced_path, settings.chunks, settings.streams
    in_order = settings.order != "any"
    return _choose(problem, *forced, settings.lane_index, in_order, direct, fake, device, tuned)


def choose_in_group(
    state: GroupState,
    problem: Problem,
    settings: Settings,
    *,
    direct: bool,
    fake: bool = False,
    device: Device | None = None,
) -> Choice:
    """`choose` with what a group knows, alike on every rank: its devices, and what it has measured.

    Args:
        device: that of this rank, to go by as long as the group does not know those of all.
    """
    known = state.device(problem.device) or device or Device()
    tuned = tuned_for(state.tuned, problem, settings.order)
    return choose(problem, settings, direct=direct, fake=fake, device=known, tuned=tuned)


class _Where(NamedTuple):
    """What decides who carries out a path: the lane, whether sums are in rank order, whether ranks reach each other's
    memory.
    """

    lane: int
    in_order: bool
    direct: bool


@lru_cache(maxsize=4096)
def _choose(
    problem: Problem,
    path: str | None,
    chunks: int | None,
    streams: int | None,
    lane: int,
    in_order: bool,
    direct: bool,
    fake: bool,
    device: Device,
    tuned: Tuned | None,
) -> Choice:
    if problem.world == 1:
        return Choice("single", "single", "world size 1: there is nobody to communicate with")
    traits = TRAITS[problem.device]
    _require_summable(problem, traits)
    reason, model = "forced", ""
    predictions: tuple[Prediction, ...] = ()
    if path in ("pipelined", "fused") and not direct:
        raise ValueError(
            f"the path {path!r} is forced, but these ranks cannot reach each other's memory; allowed here is 'c10d'"
        )
    if path == "fused" and not problem.fusible:
        path, reason = "pipelined", "'fused' is forced, but there is no kernel for this"
    free = (path, chunks, streams) == (None, None, None)
    where = _Where(lane, in_order, direct)
    best = tuned.best(_possible(problem, direct)) if tuned is not None and free else None
    if best is not None:
        (path, chunks), reason = best, str(tuned)
    elif path is None and not direct:
        path, reason = "c10d", "the ranks are on several hosts, or cannot map each other's memory"
    elif traits.costs and (path is None or (path in ("pipelined", "fused") and chunks is None)):
        costs = costs_of(traits.costs, device)
        predictions = _predictions(problem, traits, costs, path, chunks, streams, where)
        allowed = [each for each in predictions if each.path in (path, "sequential", "pipelined")]
        least = min(allowed, key=_handicapped)
        reason = _compared(least, allowed) if path is None else reason
        path, chunks, model = least.path, least.chunks, str(Device(costs.name, device.stream_waits))
    elif path is None:
        path, reason = _by_thresholds(problem, traits)
    whole = path == "sequential"
    if path == "c10d" and chunks is None:
        whole = not problem.sort.multiplies or problem.rows < traits.fewest_rows
        chunks = 2 if problem.rows >= 2 * traits.fewest_rows else 1
    arranged = _arranged(problem, traits, path, 1 if whole else chunks, streams, where)
    if arranged.exchange == "c10d" and not fake:
        _require_lane_of_library(problem, traits, path, lane, reason)
    found = replace(arranged, reason=reason, whole=whole, predictions=predictions, model=model)
    return replace(found, exchange="fake", one_shot=False) if fake else found


def _possible(problem: Problem, direct: bool) -> tuple[str, ...]:
    """The paths that a call can take."""
    return "sequential", "c10d", *(["pipelined"] if direct else []), *(["fused"] if direct and problem.fusible else [])


def _arranged(
    problem: Problem, traits: Traits, path: str, chunks: int | None, streams: int | None, where: _Where
) -> Choice:
    """A path with its chunks and streams, and its exchange."""
    whole = path == "sequential"
    # A part is never cut into more pieces than it has rows.
    chunks = min(chunks or 1, max(1, problem.rows))
    exchange = _exchange(problem, traits, path, *where)
    if path == "fused":
        return Choice(path, exchange, "", chunks, copy="copy")
    if streams is None or whole:
        streams = 1 if whole else traits.streams
    side = path == "pipelined" and (traits.copy_stream or streams == 2)
    return Choice(
        path,
        exchange,
        "",
        chunks,
        whole,
        one_shot=whole and exchange == "planned" and _fits_one_shot(problem, traits),
        compute=("compute0", "compute1")[:streams],
        copy="copy" if side else "compute0",
    )


def _predictions(
    problem: Problem,
    traits: Traits,
    costs: DeviceCosts,
    path: str | None,
    chunks: int | None,
    streams: int | None,
    where: _Where,
) -> tuple[Prediction, ...]:
    """What is predicted for each candidate: the plain way first, and of the others more chunks as long as they help."""
    cuts = CHUNKS if chunks is None else (chunks,)
    paths = (path,) if path is not None else ("pipelined", "fused") if problem.fusible else ("pipelined",)
    found: list[Prediction] = []
    if path is None:
        whole = _arranged(problem, traits, "sequential", 1, streams, where)
        found.append(predict(problem, costs, whole, in_order=where.in_order))
    for each in paths:
        last = math.inf
        for cut in dict.fromkeys(min(cut, max(1, problem.rows)) for cut in cuts):
            found.append(predict(problem, costs, _arranged(problem, traits, each, cut, streams, where)))
            if found[-1].total >= last:
                break
            last = found[-1].total
    return tuple(found)


def _handicapped(each: Prediction) -> float:
    """What counts against the plain way; see `CLEARLY`."""
    return each.total if each.path == "sequential" else max(each.total / CLEARLY, each.total + AT_LEAST)


def _compared(best: Prediction, predictions: Sequence[Prediction]) -> str:
    """Why the best one was chosen, in words."""
    other = min((each for each in predictions if each.path != best.path), key=lambda each: each.total)
    return f"predicted {best.total:.3f} ms, and {other.total:.3f} ms for {other.name}"


def _require_summable(problem: Problem, traits: Traits) -> None:
    most = traits.most_ranks_in_a_sum
    if most is not None and problem.world > most and not problem.sort.gathers:
        raise ValueError(
            f"{problem.op}: on {problem.device.upper()} at most {most} ranks can sum what they have, and there are "
            f"{problem.world}"
        )


def _by_thresholds(problem: Problem, traits: Traits) -> tuple[str, str]:
    """The path on a device whose thresholds were measured, and why."""
    rows = problem.rows
    if not problem.sort.multiplies:
        return "sequential", "there is no matmul to hide the collective behind"
    if rows < traits.fewest_rows:
        again = "what they are multiplied with" if problem.sort.any_rows else "the weight"
        what = " of the weight" if problem.sort.any_rows else ""
        return "sequential", (
            f"{rows} rows{what} a rank are under {traits.fewest_rows}: one matmul reads {again} once, not "
            f"{problem.world} times"
        )
    if problem.sort.any_rows:
        return "pipelined", f"{rows} rows and {problem.nbytes} bytes of the weight a rank"
    return "pipelined", f"{rows} rows a rank: consumed straight out of the peer's memory"


def _fits_one_shot(problem: Problem, traits: Traits) -> bool:
    # A rank reads the results of all ranks, instead of its part of each and then the sums of all.
    nbytes = problem.world * problem.m * problem.n * problem.dtype.itemsize
    return problem.sort.replicates and nbytes <= traits.most_bytes_in_one_shot


def _exchange(problem: Problem, traits: Traits, path: str, lane: int, in_order: bool, direct: bool) -> str:
    if path == "fused":
        return "fused"
    # What nothing hides is the business of the GPUs' library, unless other lanes are in use, of which that knows
    # nothing. It does not sum in rank order; one kernel of ours does, which needs the partial results in symmetric
    # memory. Products lie there in chunks too; what is not multiplied here would be copied, if it is not too large.
    few = problem.sort.multiplies or problem.world * problem.share <= traits.most_bytes_in_one_launch
    ours = not problem.sort.gathers and in_order and few
    whole = path == "sequential" and (not traits.library_collectives or lane > 0 or ours)
    return "planned" if direct and (path == "pipelined" or whole) else "c10d"


def _require_lane_of_library(problem: Problem, traits: Traits, path: str, lane: int, reason: str) -> None:
    if lane > 0 and traits.library_collectives:
        raise ValueError(
            f"lane {lane} is in use, but {problem.op} goes through torch.distributed ({path}: {reason}), whose "
            "collectives of one group cannot be in flight side by side: give each thread a process group of its own"
        )
