"""The ops, one per file. Importing this package registers them."""

from . import (  # noqa: F401 (registers their ops)
    all_gather_weight_grad,
    matmuls_all_reduce,
    matmuls_reduce_scatter,
    matmuls_reduce_scatter_keep,
    scaled_matmuls_reduce_scatter,
    scaled_matmuls_reduce_scatter_keep,
    weight_grad_reduce_scatter,
)
from .all_gather import all_gather
from .all_gather_matmul import all_gather_matmul
from .all_gather_scaled_matmul import all_gather_scaled_matmul
from .all_gather_weight_matmul import all_gather_weight_matmul
from .all_reduce import all_reduce
from .matmul_all_reduce import matmul_all_reduce
from .matmul_reduce_scatter import matmul_reduce_scatter
from .reduce_scatter import reduce_scatter
from .scaled_matmul_reduce_scatter import scaled_matmul_reduce_scatter
from .symm_mem_names import install_as_symm_mem

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_gather_scaled_matmul",
    "all_gather_weight_matmul",
    "all_reduce",
    "install_as_symm_mem",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "scaled_matmul_reduce_scatter",
]
