"""The runtime of pipelines: stages, their forward and backward passes, and what moves tensors between them."""

from .stage import Stage

__all__ = ["Stage"]
