"""Tensor-parallel modules, and parallel styles for existing modules. See docs/nn.md."""

from .linear import column_parallel
from .modules import ColumnParallelLinear, RowParallelLinear
from .prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .sequence import SequenceParallel
from .styles import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "column_parallel",
]
