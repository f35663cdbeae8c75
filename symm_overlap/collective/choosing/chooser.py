"""Choose the path of a call: one pure function, evaluated alike on every rank, that also states its reason.

``single``
    World size 1: a matmul without communication.
``sequential``
    The whole collective, then one matmul (or the reverse). Used for small problems, where chunks would cost more than
    they hide. On CPU, if the gathered tensor is not returned, it is never created as a whole: see
    `symm_overlap.runtime.cpu.sliced_matmul`.
``pipelined``
    Chunks on one or two compute streams and copy streams. The transfer of each chunk is hidden behind the matmul of
    another. One matmul may also span the parts of several ranks.
``fused``
    One kernel, whose tiles wait for the rows that copies bring, or notify the copies when rows are ready. The model
    predicts its time on every GPU, but it may choose the path only where the kernel's rate was measured: on an H200,
    for 16-bit floats and aligned sizes. Elsewhere it must be forced, or have been measured to be the quickest.
``c10d``
    Asynchronous collectives of torch.distributed, for ranks that cannot reach each other's memory. They are cut into
    chunks if there is a matmul to hide behind.

The path is how the work is arranged. The exchange is what carries it out: ``planned`` runs a plan on symmetric memory,
``fused`` launches a kernel, ``c10d`` calls torch.distributed, ``single`` has no peers to exchange with, and ``fake``
replaces peers that do not exist.

The best available knowledge decides between ``sequential``, ``pipelined`` and ``fused``, and on the number of chunks
or the span: first what the group has measured (`symm_overlap.autotune`); else, for a device whose operations have known
costs, the prediction of a model (`symm_overlap.collective.choosing.prediction`); else measured thresholds. Costs and
thresholds are traits of each kind of device (`symm_overlap.runtime.backend.Traits`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from ...runtime import TRAITS, Device, DeviceCosts, GroupState, Traits, costs_of
from ...settings import Settings
from ..problem import Problem
from .candidates import Candidate, ladders, possible, span_of
from .choice import Choice, Prediction
from .prediction import copy_streams, doubt_of_fused, predict
from .quickest import compared, quickest
from .tuned import Tuned, tuned_for


def choose(
    problem: Problem,
    settings: Settings,
    *,
    direct: bool,
    fake: bool = False,
    device: Device = Device(),  # noqa: B008 (frozen)
    tuned: Tuned | None = None,
) -> Choice:
    """Choose the path of a call. Settings that the caller has forced are taken into account.

    Args:
        direct: whether the ranks can reach each other's memory.
        fake: whether the group has no real peers.
        device: the ranks' device, on which costs depend. If it has no name, the costs of the best-known device of its
            kind are used.
        tuned: what the group has measured for such calls.

    Raises:
        ValueError: the forced path cannot run here, SYMM_OVERLAP_PATH names no path, or there are too many ranks.
    """
    return _choose(problem, settings.forced, settings.lane_index, direct, fake, device, tuned)


def choose_in_group(
    state: GroupState,
    problem: Problem,
    settings: Settings,
    *,
    direct: bool,
    fake: bool = False,
    device: Device | None = None,
) -> Choice:
    """Call `choose` with what a group knows, alike on every rank: its devices and its measurements.

    Args:
        device: this rank's device, used as long as the group does not know the devices of all ranks.
    """
    known = state.device(problem.device) or device or Device()
    tuned = tuned_for(state.tuned, problem, settings.order)
    return choose(problem, settings, direct=direct, fake=fake, device=known, tuned=tuned)


class _Forced(NamedTuple):
    """What the caller forces; None is left to the chooser. See `symm_overlap.force_path`."""

    path: str | None
    chunks: int | None
    streams: int | None
    span: int | None


class _Conditions(NamedTuple):
    """The conditions under which a call runs.

    Attributes:
        lane: the lane of the call.
        in_order: whether sums are in rank order.
        direct: whether the ranks can reach each other's memory.
    """

    lane: int
    in_order: bool
    direct: bool


class _Pick(NamedTuple):
    """A path that was picked, and why. See `Choice` for the attributes.

    A number is None if only the path was picked.
    """

    path: str
    chunks: int | None
    span: int | None
    reason: str
    predictions: tuple[Prediction, ...] = ()
    model: str = ""
    doubt: str = ""


@lru_cache(maxsize=4096)
def _choose(
    problem: Problem,
    settings: tuple[Any, ...],
    lane: int,
    direct: bool,
    fake: bool,
    device: Device,
    tuned: Tuned | None,
) -> Choice:
    """See `choose`. ``settings``: `Settings.forced`."""
    if problem.world == 1:
        return Choice("single", "single", "world size 1: there is no peer to communicate with")
    traits = TRAITS[problem.device]
    _require_summable(problem, traits)
    costs = costs_of(traits.costs, device) if traits.costs else None
    *wanted, order = settings
    forced, conditions = _Forced(*wanted), _Conditions(lane, order != "any", direct)
    pick = _pick(problem, traits, costs, forced, conditions, device, tuned)
    path, chunks, whole = pick.path, pick.chunks, pick.path == "sequential"
    if path == "c10d" and chunks is None:
        whole = not problem.op_kind.multiplies or problem.rows < traits.fewest_rows
        chunks = 2 if problem.rows >= 2 * traits.fewest_rows else 1
    candidate = Candidate(path, 1 if whole or chunks is None else chunks, pick.span or 1)
    arranged = _arranged(problem, traits, candidate, forced.streams, conditions, costs)
    if arranged.exchange == "c10d" and not fake:
        _require_lane_of_library(problem, traits, path, lane, pick.reason)
    found = replace(
        arranged, reason=pick.reason, whole=whole, predictions=pick.predictions, model=pick.model, doubt=pick.doubt
    )
    return replace(found, exchange="fake", one_shot=False) if fake else found


def _pick(
    problem: Problem,
    traits: Traits,
    costs: DeviceCosts | None,
    forced: _Forced,
    conditions: _Conditions,
    device: Device,
    tuned: Tuned | None,
) -> _Pick:
    """Pick a path by the best available knowledge. ``costs``: those of the device, if they are known."""
    direct, reason, (path, chunks, _, span) = conditions.direct, "forced", forced
    if path in ("pipelined", "fused") and not direct:
        raise ValueError(
            f"the path {path!r} is forced, but these ranks cannot reach each other's memory; allowed here is 'c10d'"
        )
    if path == "fused" and not problem.fusible:
        path, reason = "pipelined", "'fused' is forced, but there is no kernel for this"
    if tuned is not None and forced == _Forced(None, None, None, None):
        best = tuned.best(lambda each: possible(each, problem, direct))
        if best is not None:
            return _Pick(*best, str(tuned))
    if path is None and not direct:
        return _Pick("c10d", chunks, span, "the ranks are on several hosts, or cannot map each other's memory")
    if costs is not None and (path is None or (path in ("pipelined", "fused") and chunks is None)):
        predictions = _predictions(problem, traits, costs, forced._replace(path=path), conditions)
        doubt = "" if path == "fused" or not problem.fusible else doubt_of_fused(problem, costs, device)
        allowed = [each for each in predictions if not (doubt and each.path == "fused")]
        least = quickest(allowed)
        reason = compared(least, allowed) if path is None else reason
        return _Pick(*least.candidate, reason, predictions, str(Device(costs.name, device.stream_waits)), doubt)
    if path is None:
        path, reason = _by_thresholds(problem, traits)
    return _Pick(path, chunks, span, reason)


def _arranged(
    problem: Problem,
    traits: Traits,
    candidate: Candidate,
    streams: int | None,
    conditions: _Conditions,
    costs: DeviceCosts | None,
) -> Choice:
    """Return a candidate with its streams and its exchange. ``costs``: those of the device, if they are known."""
    path, whole = candidate.path, candidate.path == "sequential"
    # A part is never cut into more pieces than it has rows.
    chunks = min(candidate.chunks, max(1, problem.rows))
    exchange = _exchange(problem, traits, path, conditions)
    if path == "fused":
        return Choice(path, exchange, "", chunks, copy="copy", copies=copy_streams(problem, costs))
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
        copies=copy_streams(problem, costs) if side else 1,
        span=span_of(problem, path, chunks, candidate.span),
    )


def _predictions(
    problem: Problem, traits: Traits, costs: DeviceCosts, forced: _Forced, conditions: _Conditions
) -> tuple[Prediction, ...]:
    """Return the predicted times: first of the plain way, then of the others, with more chunks, or matmuls of more
    parts, as long as they help.
    """
    path, chunks, streams, span = forced
    paths = (path,) if path is not None else ("pipelined", "fused") if problem.fusible else ("pipelined",)
    found: list[Prediction] = []
    if path is None:
        whole = _arranged(problem, traits, Candidate("sequential"), streams, conditions, costs)
        found.append(predict(problem, costs, whole, in_order=conditions.in_order))
    for ladder in (ladder for each in paths for ladder in ladders(problem, each, chunks, span)):
        last = math.inf
        for candidate in ladder:
            found.append(predict(problem, costs, _arranged(problem, traits, candidate, streams, conditions, costs)))
            if found[-1].total >= last:
                break
            last = found[-1].total
    return tuple(found)


def _require_summable(problem: Problem, traits: Traits) -> None:
    most = traits.most_ranks_in_a_sum
    if most is not None and problem.world > most and not problem.op_kind.gathers:
        raise ValueError(
            f"{problem.op}: on {problem.device.upper()} at most {most} ranks can sum their tensors, and there are "
            f"{problem.world}"
        )


def _by_thresholds(problem: Problem, traits: Traits) -> tuple[str, str]:
    """Return the path, and the reason, on a device whose thresholds were measured."""
    rows = problem.rows
    if not problem.op_kind.multiplies:
        return "sequential", "there is no matmul to hide the collective behind"
    if rows < traits.fewest_rows:
        again = "what they are multiplied with" if problem.op_kind.moves_weight else "the weight"
        what = " of the weight" if problem.op_kind.moves_weight else ""
        return "sequential", (
            f"{rows} rows{what} a rank are under {traits.fewest_rows}: one matmul reads {again} once, not "
            f"{problem.world} times"
        )
    if problem.op_kind.moves_weight:
        return "pipelined", f"{rows} rows and {problem.nbytes} bytes of the weight a rank"
    return "pipelined", f"{rows} rows a rank: consumed straight out of the peer's memory"


def _fits_one_shot(problem: Problem, traits: Traits) -> bool:
    # In one shot a rank reads the whole results of all ranks, instead of its part of each and then all the sums.
    nbytes = problem.world * problem.m * problem.n * problem.dtype.itemsize
    return problem.op_kind.replicates and nbytes <= traits.most_bytes_in_one_shot


def _exchange(problem: Problem, traits: Traits, path: str, conditions: _Conditions) -> str:
    if path == "fused":
        return "fused"
    # The vendor's library runs collectives that no matmul hides, with two exceptions. It knows nothing of other lanes.
    # And it does not sum in rank order. A kernel of ours does, if the partial results are in symmetric memory: products
    # are written there anyway, and inputs that are not multiplied are copied there if they are not too large.
    few = problem.op_kind.multiplies or problem.world * problem.share <= traits.most_bytes_in_one_launch
    ours = not problem.op_kind.gathers and conditions.in_order and few
    whole = path == "sequential" and (not traits.library_collectives or conditions.lane > 0 or ours)
    return "planned" if conditions.direct and (path == "pipelined" or whole) else "c10d"


def _require_lane_of_library(problem: Problem, traits: Traits, path: str, lane: int, reason: str) -> None:
    if lane > 0 and traits.library_collectives:
        raise ValueError(
            f"lane {lane} is in use, but {problem.op} goes through torch.distributed ({path}: {reason}), which cannot "
            "have several collectives of one group in flight: use one process group for each thread"
        )
