"""Measuring the candidates for a call, on this rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from ...runtime import GroupState, backend_of
from ...settings import PATHS, force_path
from ..arguments import Group
from ..chooser import CHUNKS
from ..problem import Problem
from ..tuned import Candidate
from .calls import Wanted

_WARM_UP = 2
_CALLS = 3  # of one sample: a clock that is read around a single small call says little


def candidates(problem: Problem, paths: Sequence[str]) -> list[Candidate]:
    """What can be taken for a call, of these paths: the plain way first.

    Raises:
        ValueError: nothing of it can.
    """
    found: list[Candidate] = []
    for path in PATHS:
        if path not in paths or (path == "fused" and not problem.fusible):
            continue
        cuts = (1,) if path == "sequential" else CHUNKS[:2] if path == "c10d" else CHUNKS
        found += [(path, cut) for cut in dict.fromkeys(min(cut, max(1, problem.rows)) for cut in cuts)]
    if not found:
        raise ValueError(f"autotune: there is no kernel for {problem}: name another path than {', '.join(paths)}")
    return found


def problem_of(call: Wanted, group: Group, state: GroupState, device: torch.device) -> Problem:
    """What a call is, as it says itself: it is made once, plainly. Collective."""
    made = call.make(device)
    state.routes.clear()
    with force_path("sequential"), torch.no_grad():
        made(group)
    # The last one: a call may gather something small ahead.
    key = next(reversed(state.routes))
    found: Problem = key[0]
    return found


def measure(call: Wanted, found: Sequence[Candidate], group: Group, device: torch.device, rounds: int) -> list[float]:
    """Milliseconds that a call takes on this rank, by candidate: the median over rounds, which take turns.

    Collective: every rank measures the same candidates.
    """
    backend, made = backend_of(device.type), call.make(device)
    samples: list[list[float]] = [[] for _ in found]
    for turn in range(rounds + 1):
        for number, (path, chunks) in enumerate(found):
            with force_path(path, chunks=None if path == "sequential" else chunks), torch.no_grad():
                calls = _CALLS if turn else _WARM_UP
                backend.synchronize(device)
                begin = time.perf_counter()
                for _ in range(calls):
                    made(group)
                backend.synchronize(device)
                if turn:
                    samples[number].append((time.perf_counter() - begin) * 1e3 / calls)
    return [statistics.median(each) for each in samples]
