"""The symmetric memory of a model's FSDP2 communication: slots for each collective of each group."""

from __future__ import annotations

import itertools
import warnings

import torch
import torch.distributed as dist

from ..._torch import ranks_are_threads
from ...runtime import TRAITS, direct_access, state_of
from ...settings import Settings
from .slots import Slots

GATHER, REDUCE = "FSDP all-gather", "FSDP reduce-scatter"


class Memory:
    """The slots that the modules of one model share. They live as long as a module uses them.

    Args:
        settings: the settings of the caller of `symm_overlap.fsdp.apply`.
        gathers: how many slots all-gathers have at first.
    """

    def __init__(self, settings: Settings, gathers: int) -> None:
        self._settings, self._counts = settings, {GATHER: gathers, REDUCE: 2}
        # Keyed by ranks: ``reshard_after_forward=n`` creates a new group of the same ranks for every module.
        self._found: dict[tuple[str, torch.device, tuple[int, ...]], Slots | str] = {}
        self._numbers = itertools.count()
        self._needs: dict[Slots, tuple[int, int]] = {}

    def number(self) -> int:
        """Return a number for one more caller, the same on all ranks, since they set their modules in the same
        order."""
        return next(self._numbers)

    def require(self, op: str, group: dist.ProcessGroup, device: torch.device, nbytes: int, count: int = 0) -> str:
        """Note that a collective needs ``count`` slots of ``nbytes``.

        Collective if the group is new.

        Returns:
            Why the collective is left to torch; empty if it is not.
        """
        found = self._look_up(op, group, device)
        if isinstance(found, str):
            return found
        most = self._needs.get(found, (found.count, 0))
        self._needs[found] = max(most[0], count), max(most[1], nbytes)
        return ""

    def reserve(self) -> None:
        """Allocate memory for what has been noted. Collective."""
        for slots, (count, nbytes) in self._needs.items():
            if nbytes:
                slots.reserve(count, nbytes)
        self._needs.clear()

    def slots(self, op: str, group: dist.ProcessGroup, device: torch.device) -> Slots | None:
        """Return the slots of a group, or None if the group is left to torch. Collective if the group is new."""
        known = (op, device, _ranks(group)) in self._found
        found = self._look_up(op, group, device)
        if isinstance(found, str):
            if not known:
                warnings.warn(
                    f"{op}s in a group that is new since apply was called are left to torch: {found}", stacklevel=2
                )
            return None
        return found

    def _look_up(self, op: str, group: dist.ProcessGroup, device: torch.device) -> Slots | str:
        key = op, device, _ranks(group)
        found = self._found.get(key)
        if found is None:
            found = why_not(op, group, device, self._settings) or Slots(
                op, group, device, self._counts[op], self._settings
            )
            self._found[key] = found
        return found


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def why_not(op: str, group: dist.ProcessGroup, device: torch.device, settings: Settings) -> str:
    """Return why a collective of a group is left to torch; empty if it is not.

    Collective, with the same result on every rank.
    """
    state, traits = state_of(group), TRAITS.get(device.type)
    if state.fake:
        return "its group is a fake one, without other processes"
    if state.world == 1:
        return "its group has only one rank, so there is no communication"
    if ranks_are_threads(group):
        return "the ranks of its group are threads of one process"
    if traits is None:
        return f"symm_overlap does not know the device {str(device)!r}"
    if settings.forced_path == "c10d":
        return 'force_path("c10d") or SYMM_OVERLAP_PATH=c10d is set'
    if not direct_access(state, device, settings.comparing):
        return "the ranks of its group cannot reach each other's memory"
    most = traits.most_ranks_in_a_sum
    if op == REDUCE and most is not None and state.world > most:
        return f"its gradients are reduced over {state.world} ranks, and one sum supports at most {most}"
    return ""
