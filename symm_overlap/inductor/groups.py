"""What is known about groups when a graph is compiled. This decides which paths the ops of the graph would use."""

from __future__ import annotations

import torch

from .._torch import resolve_group
from ..collective.choosing.choice import Choice
from ..collective.choosing.chooser import choose_in_group
from ..collective.problem import Problem
from ..runtime import TRAITS, GroupState, backend_of, state_of
from ..settings import Settings
from ._torch import groups


def choice_in(group: str, problem: Problem, settings: Settings, device: torch.device) -> Choice:
    """Return what the chooser would choose for a call in a group.

    The chooser uses what the group knows about its devices and has measured, which is the same on all ranks. If the
    group does not know its devices yet, the chooser uses the device that the graph is compiled for. Asking the other
    ranks would be a collective, and ranks may compile at different times, or not at all. For the same reason it assumes
    that ranks reach each other's memory.

    Raises:
        ValueError: the path that the user has forced is not possible.
    """
    own = backend_of(problem.device).described(device, use=False)
    return choose_in_group(state_of(resolve_group(group)), problem, settings, direct=True, device=own)


def known_of_groups() -> tuple[str, ...]:
    """Return a text for each group: its size, its devices if costs depend on them, and what was measured.

    This does not start to use a device that the process does not use yet, because all tensors may be on the CPU.
    """
    own = {kind: _own_devices(kind) for kind, traits in TRAITS.items() if traits.costs}
    return tuple(sorted(_known(name, state_of(group), own) for name, group in groups().items()))


def _known(name: str, state: GroupState, own: dict[str, str]) -> str:
    devices = [str(state.device(kind) or here) for kind, here in own.items()]
    measured = sorted(f"{key}: {entry}" for key, entry in state.tuned.items())
    return f"{name} of {state.world} ranks: {devices}, {measured}"


def _own_devices(kind: str) -> str:
    """Return the devices of a kind that a graph can be compiled for, or a single one if all are alike.

    A single one has the form in which the group will know its devices.
    """
    count = torch.get_device_module(kind).device_count()
    found = [str(backend_of(kind).described(torch.device(kind, index), use=False)) for index in range(count)]
    return found[0] if len(set(found)) == 1 else str(found)
