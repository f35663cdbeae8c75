"""Run schedules: stages, and a runtime that runs a schedule on them. Unlike schedules alone, this needs torch."""

from .record import Record
from .schedule_runtime import PipelineRuntime
from .stage import Stage

__all__ = ["PipelineRuntime", "Record", "Stage"]
