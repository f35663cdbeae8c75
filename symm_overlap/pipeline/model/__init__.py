"""The front end: it turns an ordinary model into a pipeline. See docs/pipeline.md."""

from .pipeline_model import PipelineModel
from .trace.error import TraceError

__all__ = ["PipelineModel", "TraceError"]
