"""The ranks that make a call together."""

from __future__ import annotations

from ..._torch import resolve_group
from ...runtime import GroupState, state_of
from ...settings import Settings


class Peers:
    """The group in which a call is made, and this process's rank in it.

    Creating a `Peers` counts the call, even if its arguments are rejected later. So the ranks' counts stay equal as
    long as all ranks make the same calls.

    Attributes:
        number: how many calls of its lane this rank has counted, this one included.
        announced: whether the peers have been notified of this call (comparison.py).
    """

    __slots__ = ("announced", "group", "number", "rank", "settings", "state", "world")

    def __init__(self, group_name: str, settings: Settings) -> None:
        self.group = resolve_group(group_name)
        self.state: GroupState = state_of(self.group)
        self.settings = settings
        self.rank, self.world = self.state.rank, self.state.world
        self.announced = False
        lane = settings.lane_index
        self.state.calls[lane] = self.number = self.state.calls[lane] + 1

    def forget(self) -> None:
        """Do not count this call, because it was only captured, or rejected before it began. The graph of a captured
        call may be thrown away on this rank alone, for instance because the capture failed later. The peers do not know
        of that.
        """
        self.state.calls[self.settings.lane_index] -= 1
