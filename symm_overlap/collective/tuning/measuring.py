"""Measure the candidates for a call, on this rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from ...blocks import force_path
from ...runtime import GroupState, backend_of
from ...settings import PATHS
from ..arguments import Group
from ..choosing.candidates import Candidate, ladders
from ..problem import Problem
from .calls import Wanted

_WARM_UP = 2
_CALLS = 3  # for each sample, because the time of a single small call is too noisy


def candidates(problem: Problem, paths: Sequence[str]) -> list[Candidate]:
    """Return the candidates for a call among these paths, the plain way first.

    Raises:
        ValueError: the call can use none of these paths.
    """
    found: list[Candidate] = []
    for path in PATHS:
        if path not in paths or (path == "fused" and not problem.fusible):
            continue
        found += [candidate for ladder in ladders(problem, path) for candidate in ladder]
    if not found:
        raise ValueError(f"autotune: there is no kernel for {problem}: name another path than {', '.join(paths)}")
    return found


def problem_of(call: Wanted, group: Group, state: GroupState, device: torch.device) -> Problem:
    """Return the problem of a call. The call is made once, sequentially, to find out. Collective."""
    made = call.make(device)
    state.forget_routes()
    with force_path("sequential"), torch.no_grad():
        made(group)
    # The last route is the call's own: a call may first gather something small, which has a route too.
    key = next(reversed(state.routes))
    found: Problem = key[0]
    return found


def measure(call: Wanted, found: Sequence[Candidate], group: Group, device: torch.device, rounds: int) -> list[float]:
    """Return how many milliseconds a call takes on this rank, for each candidate: the median over ``rounds`` samples.

    Each round measures every candidate once. Collective: every rank measures the same candidates.
    """
    backend, made = backend_of(device.type), call.make(device)
    samples: list[list[float]] = [[] for _ in found]
    for turn in range(rounds + 1):
        for number, (path, chunks, span) in enumerate(found):
            with force_path(path, chunks=None if path == "sequential" else chunks, span=span), torch.no_grad():
                calls = _CALLS if turn else _WARM_UP
                backend.synchronize(device)
                begin = time.perf_counter()
                for _ in range(calls):
                    made(group)
                backend.synchronize(device)
                if turn:
                    samples[number].append((time.perf_counter() - begin) * 1e3 / calls)
    return [statistics.median(each) for each in samples]
