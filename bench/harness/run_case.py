"""One case: set up the methods, check the results of each, time them, and return the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bench.harness import NotAvailableError
from bench.harness.case import Case, inputs, reference
from bench.harness.check import Checked, error_bound, first_difference, poisoned_empty, relative_error
from bench.harness.exposed import Profiling, exposures
from bench.harness.launch import Rank
from bench.harness.timing import Timed, issue_times, over_ranks, time_methods
from bench.methods.method import Method, Prepared


def run_case(
    rank: Rank,
    case: Case,
    methods: Sequence[Method],
    rounds: int,
    seed: int,
    *,
    issue: bool = False,
    profiling: Profiling | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of one case, in the order of `methods`. Every rank returns the same rows.

    Args:
        issue: whether the rows also contain the times of `issue_times`.
        profiling: if given, how calls are recorded, so that the rows contain what is exposed on rank 0.
    """
    a, b = inputs(case, rank.rank, "normal", rank.device)
    ready: dict[str, Prepared] = {}
    reasons: dict[str, str] = {}
    for method in methods:
        if case.op not in method.ops:
            continue
        prepared, reason = _prepare(rank, method, case, a, b)
        # If one rank cannot run the method, no rank may run it: the others would wait for that rank.
        reasons[method.name] = reason = next((one for one in rank.all(reason) if one), "")
        if prepared is not None and not reason:
            ready[method.name] = prepared
    checks = _check_all(rank, case, ready, a, b)
    timed = {name: Timed(prepared.call, prepared.around, prepared.operations) for name, prepared in ready.items()}
    samples = rank.all(time_methods(rank, timed, rounds, seed=seed))
    issued = rank.all(issue_times(rank, timed, min(20, rounds))) if issue else []
    shown = rank.all(exposures(rank, timed, profiling, _file_name(case)))[0] if profiling else {}
    rows = []
    for name, reason in reasons.items():
        row: dict[str, Any] = {**case.key(), "method": name, "label": case.label}
        if reason:
            row |= {"median_ms": None, "reason": reason}
        else:
            row |= over_ranks([one[name] for one in samples]) | _checked_fields(checks.get(name))
            row |= {what: max(one[name][what] for one in issued) for what in (issued[0][name] if issued else ())}
            row |= {"exposure_ms": shown[name]} if name in shown else {}
            row |= _arrangement(ready[name])
        rows.append(row)
    return rows


def _arrangement(prepared: Prepared) -> dict[str, Any]:
    """Return the path of the calls, their chunks and their copy streams, if the chooser arranges them."""
    if prepared.choice is None:
        return {}
    with prepared.around():
        choice = prepared.choice()
    return {"path": choice.path, "chunks": choice.chunks, "copy_streams": choice.copies, "span": choice.span}


def _file_name(case: Case) -> str:
    return f"{case.op}_{case.m}_{case.n}_{case.k}"


def _prepare(rank: Rank, method: Method, case: Case, a: torch.Tensor, b: torch.Tensor) -> tuple[Prepared | None, str]:
    try:
        prepared = method.prepare(rank, case, a, b)
    except NotAvailableError as reason:
        return None, str(reason)
    prepared.load("normal")
    return prepared, ""


def _check_all(
    rank: Rank, case: Case, ready: dict[str, Prepared], a: torch.Tensor, b: torch.Tensor
) -> dict[str, list[Checked]]:
    """Run both checks of every method with results. Return the outcomes of all ranks.

    Afterwards, `a` and `b` contain the normal inputs.
    """
    checked = {name: prepared for name, prepared in ready.items() if prepared.results is not None}
    exact: dict[str, str] = {}
    error: dict[str, float] = {}
    for kind in ("binary", "normal"):
        expected = reference(case, rank.rank, kind, rank.device)
        for tensor, content in zip((a, b), inputs(case, rank.rank, kind, rank.device), strict=True):
            tensor.copy_(content)
        for prepared in ready.values():
            prepared.load(kind)
        for name, prepared in checked.items():
            found = _poisoned_call(rank, prepared)
            if kind == "binary":
                differences = (first_difference(key, value, expected[key]) for key, value in found.items())
                exact[name] = next((one for one in differences if one), "")
            else:
                error[name] = max(relative_error(value, expected[key]) for key, value in found.items())
    bound = error_bound(case)
    return {name: rank.all(Checked(not exact[name], error[name], bound, exact[name])) for name in checked}


def _poisoned_call(rank: Rank, prepared: Prepared) -> dict[str, torch.Tensor]:
    """Fill outputs and buffers with NaN on every rank, make a call, and return its results."""
    prepared.poison()
    _meet(rank)  # protects results: no rank may write to a peer that is still filling its buffers with NaN
    with poisoned_empty(), prepared.around(), prepared.exactly():
        returned = prepared.call()
    assert prepared.results is not None
    results = dict(prepared.results(returned))
    _meet(rank)
    return results


def _meet(rank: Rank) -> None:
    """Wait until the devices of all ranks have finished all enqueued work."""
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
    rank.start.wait()


def _checked_fields(checks: list[Checked] | None) -> dict[str, Any]:
    """Return the fields of a row that describe its checks. The worst rank counts."""
    if checks is None:
        return {}
    return {
        "ok": all(check.ok for check in checks),
        "exact": all(check.exact for check in checks),
        "relative_error": max(check.relative_error for check in checks),
        "error_bound": checks[0].bound,
        "detail": next((f"rank {rank}: {check.detail}" for rank, check in enumerate(checks) if check.detail), ""),
    }
