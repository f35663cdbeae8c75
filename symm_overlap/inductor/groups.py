"""What is known of groups when a graph is compiled, and decides which paths its ops would take."""

from __future__ import annotations

import torch

from .._torch import resolve_group
from ..collective.choice import Choice
from ..collective.chooser import choose_in_group
from ..collective.problem import Problem
from ..runtime import TRAITS, Device, GroupState, backend_of, state_of
from ..settings import Settings
from ._torch import groups


def choice_in(group: str, problem: Problem, settings: Settings, device: torch.device) -> Choice:
    """What the chooser would choose for a call in a group.

    It goes by what the group knows of its devices and has measured, which all ranks have learnt together, else by the
    device that the graph is compiled for: to ask the others would be a collective, and ranks may compile at different
    times, or not at all. For the same reason ranks are taken to reach each other's memory.

    Raises:
        ValueError: the path that the user has forced is not possible.
    """
    own = backend_of(problem.device).described(device)
    return choose_in_group(state_of(resolve_group(group)), problem, settings, direct=True, device=own)


def known_of_groups() -> tuple[str, ...]:
    """In words, by group: its size, the device that counts where costs depend on it, and what was measured."""
    return tuple(sorted(_known(name, state_of(group)) for name, group in groups().items()))


def _known(name: str, state: GroupState) -> str:
    devices = [str(_device(state, kind)) for kind, traits in TRAITS.items() if traits.costs]
    measured = sorted(f"{key}: {entry}" for key, entry in state.tuned.items())
    return f"{name} of {state.world} ranks: {devices}, {measured}"


def _device(state: GroupState, kind: str) -> Device:
    return state.device(kind) or backend_of(kind).described(torch.device(kind))
