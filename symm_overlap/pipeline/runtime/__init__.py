"""Run schedules: stages, and a runtime that carries out a schedule on them. Needs torch, unlike schedules alone."""

from .record import Record
from .schedule_runtime import PipelineRuntime
from .stage import Stage

__all__ = ["PipelineRuntime", "Record", "Stage"]
