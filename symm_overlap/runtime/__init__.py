"""What the ops stand on: one back end for each kind of device, lanes of calls, and who can reach whom."""

from .backend import Backend, Traits, Workspace
from .backends import TRAITS, backend_of
from .group import GroupState, state_of
from .lane import Lane, NotPreparedError
from .lane_group import lane_group
from .topology import compares, direct_access

__all__ = [
    "TRAITS",
    "Backend",
    "GroupState",
    "Lane",
    "NotPreparedError",
    "Traits",
    "Workspace",
    "backend_of",
    "compares",
    "direct_access",
    "lane_group",
    "state_of",
]
