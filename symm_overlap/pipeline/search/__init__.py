"""Search for the pipeline schedule that takes least time with given costs, under a cap on activations.

1. The schedules of all generators, with every number of stages a rank, are simulated.
2. On each placement of stages a list scheduler makes others, with policies that are searched (`constructed`).
3. The best of all are improved by small changes (`moves`, `improve`).

The best within the cap is lowered, verified and returned, so it is never worse than the best handcrafted one.
"""

from .find import search
from .result import SearchResult, Start
from .starts import PARTITIONS, Refused

__all__ = ["PARTITIONS", "Refused", "SearchResult", "Start", "search"]
