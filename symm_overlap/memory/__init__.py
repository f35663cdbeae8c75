"""Symmetric memory for CPU ranks, lanes of workspace and channels, deadlines, and who can reach whom."""

from .lane import Lane, aligned, current_lane, lane, lane_for
from .outputs import new_output
from .timeouts import timeout, timeout_ms
from .topology import direct_access

__all__ = [
    "Lane",
    "aligned",
    "current_lane",
    "direct_access",
    "lane",
    "lane_for",
    "new_output",
    "timeout",
    "timeout_ms",
]
