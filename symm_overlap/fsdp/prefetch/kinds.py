"""The kinds of steps of a training step with FSDP2. See `symm_overlap.fsdp.prefetch.step_plan` for the memory they use.

Gathers and reduce-scatters are collectives: a rank leaves one when all ranks have reached it. Each layer has one
channel for each of the two. So ranks that gather layers in different orders wait for each other forever, and `verify`
reports it.
"""

from __future__ import annotations

from ...plan import Kind, register

GATHER, COPY_OUT, RESHARD = "gather", "copy-out", "reshard"
FORWARD, BACKWARD = "forward", "backward"
COPY_IN, REDUCE = "copy-in", "reduce-scatter"
OPTIMIZER, OTHER = "optimizer", "other"

register(Kind(GATHER, "copy engine", "meet", "#eeca3b", meets="everyone"))
register(Kind(COPY_OUT, "SMs", "copy", "#ff9da6"))
register(Kind(RESHARD, "", "order", "#bab0ac", frees=True))
register(Kind(FORWARD, "SMs", "compute", "#4c78a8"))
register(Kind(BACKWARD, "SMs", "compute", "#e45756"))
register(Kind(COPY_IN, "SMs", "copy", "#d6a5c9"))
register(Kind(REDUCE, "copy engine", "meet", "#9d755d", meets="everyone"))
register(Kind(OPTIMIZER, "SMs", "compute", "#72b7b2"))
register(Kind(OTHER, "SMs", "compute", "#9ecae9"))
