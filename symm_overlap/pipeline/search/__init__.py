"""Search for the pipeline schedule that is fastest with given costs, under a cap on the memory of activations.

1. The schedules of all generators are simulated, with every number of stages per rank.
2. For each placement of stages, a list scheduler creates others. Its policies are searched too (`constructed`).
3. The best of all are improved by small changes (`moves`, `improve`).

The best schedule within the cap is lowered, verified and returned, so it is never worse than the best handcrafted one.
"""

from .find import search
from .result import SearchResult, Start
from .starts import PARTITIONS, RejectedStart

__all__ = ["PARTITIONS", "RejectedStart", "SearchResult", "Start", "search"]
