"""Pictures of plans: text for a terminal, SVG for a page, a trace for Perfetto."""

from .svg import svg
from .text import text
from .trace import trace

__all__ = ["svg", "text", "trace"]
