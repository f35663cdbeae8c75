"""Generate, read, convert, lower, verify, simulate and run pipeline schedules. See docs/pipeline.md."""

from importlib import import_module
from typing import Any

from .action import Action, compound_of
from .csv_text import read_csv, write_csv
from .schedule import Schedule
from .simulation.cost import simulate_cost
from .simulation.costs import PipelineCosts
from .simulation.unit_time import DeadlockError, simulate_unit_time
from .verify import verify

_NEED_TORCH = {
    "PipelineModel": "model",
    "PipelineRuntime": "runtime",
    "Stage": "runtime",
    "from_torch": "interop",
    "to_torch": "interop",
    "torch_schedule": "torch_runtime",
}
"""For each name that needs torch, the module that defines it. These modules are imported at the first use of the name,
because schedules alone need no torch."""


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Action",
    "DeadlockError",
    "PipelineCosts",
    "PipelineModel",
    "PipelineRuntime",
    "Schedule",
    "Stage",
    "compound_of",
    "from_torch",
    "read_csv",
    "simulate_cost",
    "simulate_unit_time",
    "to_torch",
    "torch_schedule",
    "verify",
    "write_csv",
]
