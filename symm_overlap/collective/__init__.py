"""Collective matmul: the ops, how they are carried out, and the plans they run."""

from .choosing.choice import Choice
from .empty import empty
from .exchange import called
from .explain import explain
from .ops import (
    all_gather,
    all_gather_matmul,
    all_gather_scaled_matmul,
    all_gather_weight_matmul,
    all_reduce,
    install_as_symm_mem,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter,
    scaled_matmul_reduce_scatter,
)
from .prepare import prepare, raise_failures
from .tuning import Tuned, autotune

__all__ = [
    "Choice",
    "Tuned",
    "all_gather",
    "all_gather_matmul",
    "all_gather_scaled_matmul",
    "all_gather_weight_matmul",
    "all_reduce",
    "autotune",
    "called",
    "empty",
    "explain",
    "install_as_symm_mem",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "prepare",
    "raise_failures",
    "reduce_scatter",
    "scaled_matmul_reduce_scatter",
]
