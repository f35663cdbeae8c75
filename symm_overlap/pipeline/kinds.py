"""Register the kinds of actions as kinds of steps, so that the code that draws plans can draw pipelines too."""

from __future__ import annotations

from ..plan import Kind, register
from .action import (
    AWAITED_SENDS,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECVS,
    REDUCE_GRAD,
    RESHARD,
    SENDS,
    UNSHARD,
    WAIT_REDUCE_GRAD,
)

_COMPUTE = {
    FORWARD: "#4c78a8",
    BACKWARD_INPUT: "#f58518",
    BACKWARD_WEIGHT: "#72b7b2",
    FULL_BACKWARD: "#e45756",
    OVERLAP_F_B: "#b279a2",
}
_COPIES = {UNSHARD: "#eeca3b", REDUCE_GRAD: "#9d755d"}

for _name, _colour in _COMPUTE.items():
    register(Kind(_name, "SMs", "compute", _colour))
for _name, _colour in _COPIES.items():
    register(Kind(_name, "copy engine", "copy", _colour))
for _name in SENDS:
    register(Kind(_name, "copy engine", "meet", "#54a24b", meets="posts"))
for _name in RECVS:
    register(Kind(_name, "", "meet", "#e6e6e6", meets="awaits"))
for _name in (RESHARD, *AWAITED_SENDS, WAIT_REDUCE_GRAD):
    register(Kind(_name, "", "order", "#bab0ac"))
