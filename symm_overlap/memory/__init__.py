"""Symmetric memory for CPU ranks, lanes of workspace and channels, deadlines, and who can reach whom."""

from .lane import Lane, NotPreparedError, aligned, current_lane, lane, lane_for
from .lane_group import lane_group
from .outputs import new_output
from .signals import naming
from .timeouts import not_while_compiling, timeout, timeout_ms
from .topology import direct_access

__all__ = [
    "Lane",
    "NotPreparedError",
    "aligned",
    "current_lane",
    "direct_access",
    "lane",
    "lane_for",
    "lane_group",
    "naming",
    "new_output",
    "not_while_compiling",
    "timeout",
    "timeout_ms",
]
