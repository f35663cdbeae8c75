"""What the actions of a pipeline cost: the input of the cost simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite

from ..plan.work import doubles
from .encoded import NUMBERS
from .work import NUMBERS_OF_KINDS, Durations

PerStage = float | Sequence[float]
"""One number for all stages, or one for each."""


@dataclass(frozen=True)
class PipelineCosts:
    """How long actions take and how much memory they keep, in any unit of time (1e-9 is no time) and of memory.

    Attributes:
        forward, input_grad, weight_grad: F, I and W of one microbatch.
        full_backward: B; by default what I and W take together.
        overlap: a compound of a forward and a backward takes so many times what they take one after the other.
        message: how large the output of a stage is for one microbatch, in bytes; the gradient that comes back is as
            large. It takes ``message / bandwidth`` on the copy engine, and ``latency`` until it is there.
        one_receive_stream: all receives of a rank wait for each other, in the order of its row, as where one stream
            has them all. Otherwise those from different ranks do not, and where a receive stands does not matter.
        unshard, reduce_grad: UNSHARD and REDUCE_GRAD; they use the same copy engine.
        slow_down: compute takes so many times as long while its rank sends, gathers or reduces.
        activation: the memory that a stage keeps for one microbatch, from its forward to the end of its backward.
        kept: how much of that is left after I, until the end of W; by default all.
        parameters: the memory of a stage's unsharded parameters.

    Raises:
        ValueError: a number below 0 or not finite, a bandwidth of 0, a slow-down below 1.
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    full_backward: PerStage | None = None
    overlap: float = 1.0
    message: PerStage = 0.0
    bandwidth: float = 1.0
    latency: float = 0.0
    one_receive_stream: bool = False
    unshard: PerStage = 0.0
    reduce_grad: PerStage = 0.0
    slow_down: float = 1.0
    activation: PerStage = 1.0
    kept: PerStage | None = None
    parameters: PerStage = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            numbers = [] if value is None else value if isinstance(value, Sequence) else [value]
            least = 1.0 if field.name == "slow_down" else 0.0
            if not all(isfinite(number) and number >= least for number in numbers):
                raise ValueError(f"{field.name} is {value}: costs are finite numbers, from {least:g} on")
        if not self.bandwidth:
            raise ValueError("bandwidth is 0, so no message would ever arrive: give what passes in a unit of time")

    def each(self, name: str, stages: int) -> list[float]:
        """A cost of every stage.

        Raises:
            ValueError: it was given for another number of stages.
        """
        value = getattr(self, name)
        if value is None:
            if name == "kept":
                return self.each("activation", stages)
            pairs = zip(self.each("input_grad", stages), self.each("weight_grad", stages), strict=True)
            return [of_input + of_weight for of_input, of_weight in pairs]
        if not isinstance(value, Sequence):
            return [float(value)] * stages
        if len(value) != stages:
            raise ValueError(f"{name} has {len(value)} numbers, but there are {stages} stages: give one, or {stages}")
        return list(map(float, value))

    def durations(self, stages: int) -> Durations:
        """How long each kind of action of each stage takes.

        Raises:
            ValueError: a cost was given for another number of stages.
        """
        transfer = [size / self.bandwidth for size in self.each("message", stages)]
        bodies = {
            "F": self.each("forward", stages),
            "I": self.each("input_grad", stages),
            "W": self.each("weight_grad", stages),
            "B": self.each("full_backward", stages),
            "UNSHARD": self.each("unshard", stages),
            "REDUCE_GRAD": self.each("reduce_grad", stages),
            "SEND_F": transfer,
            "SEND_B": [0.0, *transfer[:-1]],  # the gradient of the output of the stage before
        }
        body, tail = [0.0] * (NUMBERS_OF_KINDS * stages), [0.0] * (NUMBERS_OF_KINDS * stages)
        for kind, values in bodies.items():
            start = NUMBERS[kind] * stages
            body[start : start + stages] = values[:stages]
            if kind in ("SEND_F", "SEND_B"):
                tail[start : start + stages] = [self.latency] * stages
        return Durations(doubles(body), doubles(tail))
