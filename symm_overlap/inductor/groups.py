"""What is known of groups when a graph is compiled, and decides which paths its ops would take."""

from __future__ import annotations

import torch

from .._torch import resolve_group
from ..collective.choice import Choice
from ..collective.chooser import choose_in_group
from ..collective.problem import Problem
from ..runtime import TRAITS, GroupState, backend_of, state_of
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
    own = backend_of(problem.device).described(device, use=False)
    return choose_in_group(state_of(resolve_group(group)), problem, settings, direct=True, device=own)


def known_of_groups() -> tuple[str, ...]:
    """In words, by group: its size, the devices that count where costs depend on them, and what was measured.

    Devices that this process does not use stay so, as there may be nothing but tensors on CPUs.
    """
    own = {kind: _own_devices(kind) for kind, traits in TRAITS.items() if traits.costs}
    return tuple(sorted(_known(name, state_of(group), own) for name, group in groups().items()))


def _known(name: str, state: GroupState, own: dict[str, str]) -> str:
    devices = [str(state.device(kind) or here) for kind, here in own.items()]
    measured = sorted(f"{key}: {entry}" for key, entry in state.tuned.items())
    return f"{name} of {state.world} ranks: {devices}, {measured}"


def _own_devices(kind: str) -> str:
    """The devices of a kind that a graph can be for; one for all if they are alike, as the group will know them."""
    count = torch.get_device_module(kind).device_count()
    found = [str(backend_of(kind).described(torch.device(kind, index), use=False)) for index in range(count)]
    return found[0] if len(set(found)) == 1 else str(found)
