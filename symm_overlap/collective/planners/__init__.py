"""Planners of collective matmul: pure functions from (rank, world size, choices) to plans.

Each overlapped planner has a sequential twin, which makes the same exchange without cutting it into chunks:

========================  ===========================  =================================
plain PyTorch             overlapped                   sequential
========================  ===========================  =================================
all_gather(X) @ B         `all_gather_consume`         `gather_then_consume`
reduce_scatter(X @ B)     `produce_reduce_scatter`     `produce_then_reduce_scatter`
all_reduce(X @ B)         `produce_all_reduce`         `produce_then_all_reduce`
========================  ===========================  =================================

For small all-reduces there is a third planner, `one_shot_all_reduce`. `fused_all_gather_matmul`,
`fused_matmul_reduce_scatter` and `fused_matmul_all_reduce` plan a single kernel, which waits for the rows that it
reads, or sets a flag for each chunk of rows that it has written. `one_launch` turns their plans into the form that is
issued.
"""

from .all_gather_consume import all_gather_consume
from .contracts import ALL_GATHER, ALL_GATHER_MATMUL, ALL_GATHER_MATMUL_TOTAL, MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER
from .fused_all_gather_matmul import fused_all_gather_matmul
from .fused_matmul_all_reduce import fused_matmul_all_reduce
from .fused_matmul_reduce_scatter import fused_matmul_reduce_scatter
from .gather_then_consume import gather_then_consume
from .one_launch import issued, one_launch
from .one_shot_all_reduce import one_shot_all_reduce
from .produce_all_reduce import produce_all_reduce
from .produce_reduce_scatter import produce_reduce_scatter
from .produce_then_all_reduce import produce_then_all_reduce
from .produce_then_reduce_scatter import produce_then_reduce_scatter

__all__ = [
    "ALL_GATHER",
    "ALL_GATHER_MATMUL",
    "ALL_GATHER_MATMUL_TOTAL",
    "MATMUL_ALL_REDUCE",
    "MATMUL_REDUCE_SCATTER",
    "all_gather_consume",
    "fused_all_gather_matmul",
    "fused_matmul_all_reduce",
    "fused_matmul_reduce_scatter",
    "gather_then_consume",
    "issued",
    "one_launch",
    "one_shot_all_reduce",
    "produce_all_reduce",
    "produce_reduce_scatter",
    "produce_then_all_reduce",
    "produce_then_reduce_scatter",
]
