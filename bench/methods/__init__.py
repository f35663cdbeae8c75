"""The methods that are timed: one `Method` for each row of the table, in the order of the rows."""

from __future__ import annotations

from bench.methods import bounds, ours, plain, published, torch_op
from bench.methods.method import Method, Prepared

METHODS: dict[str, Method] = {
    method.name: method
    for method in (*bounds.METHODS, *plain.METHODS, *torch_op.METHODS, *published.METHODS, *ours.METHODS)
}

__all__ = ["METHODS", "Method", "Prepared"]
