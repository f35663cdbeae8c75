"""The costs of the actions of a pipeline, which are the input of the cost simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite

from ...plan.work import doubles
from ..action import SENDS
from .encoded import NUMBERS
from .work import NUMBERS_OF_KINDS, Durations

PerStage = float | Sequence[float]
"""One number for all stages, or one number for each stage."""

OF_PIPELINE = ("overlap", "bandwidth", "latency", "one_receive_stream", "slow_down")
"""The costs that have one number for the whole pipeline."""


@dataclass(frozen=True)
class PipelineCosts:
    """How long actions take and how much memory they keep.

    Time can have any unit in which 1e-9 is negligible, and memory can have any unit.

    Attributes:
        forward, input_grad, weight_grad: the durations of F, I and W for one microbatch.
        full_backward: the duration of B; by default the sum of I and W.
        overlap: the duration of a compound, as a multiple of the time that its forward and its backward take one after
            the other.
        message: the size of a stage's output for one microbatch, in bytes. The gradient that comes back is as large.
        bandwidth: a message occupies the copy engine for ``message / bandwidth``.
        latency: the message arrives so much time after that.
        one_receive_stream: True: each receive of a rank waits for the receive before it in the row, as if one stream
            carried them all. False: receives from different ranks do not wait for each other, and the position of a
            receive in the row does not matter.
        unshard, reduce_grad: the durations of UNSHARD and REDUCE_GRAD. They use the same copy engine as sends.
        slow_down: the factor by which compute takes longer while its rank sends, gathers or reduces.
        activation: the memory that a stage keeps for one microbatch, from its forward to the end of its backward.
        kept: how much of that memory is still kept after I, until the end of W; by default all of it.
        parameters: the memory of a stage's unsharded parameters.

    Raises:
        ValueError: a number is below 0 or not finite, the bandwidth is 0, or the slow-down is below 1.
        TypeError: a cost is not a number, or not what can be given for it.
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
            value, name = getattr(self, field.name), field.name
            if value is None and name in ("full_backward", "kept"):
                continue
            numbers = value if isinstance(value, Sequence) and name not in OF_PIPELINE else [value]
            if not all(hasattr(type(number), "__float__") for number in numbers):
                what = "a number" if name in OF_PIPELINE else "a number, or one for each stage"
                raise TypeError(f"{name} is {value!r}: give {what}")
            least = 1.0 if name == "slow_down" else 0.0
            if not all(isfinite(number) and number >= least for number in numbers):
                raise ValueError(f"{name} is {value}: costs are finite numbers that are at least {least:g}")
        if not self.bandwidth:
            raise ValueError("bandwidth is 0, so no message would ever arrive: give the bytes per unit of time")

    def each(self, name: str, stages: int) -> list[float]:
        """Return one cost as a list with one number for each stage.

        Args:
            name: the name of the attribute.
            stages: how many stages there are.

        Raises:
            ValueError: the cost was given for another number of stages.
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
        """Return how long each kind of action of each stage takes.

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
            if kind in SENDS:
                tail[start : start + stages] = [self.latency] * stages
        return Durations(doubles(body), doubles(tail))
