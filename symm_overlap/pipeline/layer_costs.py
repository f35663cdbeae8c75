"""The costs of a model's layers. The costs of the stages of any pipeline over these layers follow from them.

A search tries pipelines with different numbers of stages, so it needs costs that hold for all of them. A layer is the
unit that is never cut. It is usually a transformer block. If only whole stages were measured, each of these is a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from .simulation.costs import PipelineCosts

_SUMMED = (
    "forward",
    "input_grad",
    "weight_grad",
    "full_backward",
    "unshard",
    "reduce_grad",
    "activation",
    "kept",
    "parameters",
)


@dataclass(frozen=True)
class LayerCosts:
    """The costs of a model's layers.

    Attributes:
        layers: the number of layers.
        costs: the costs of each layer: one number for all layers or one for each. Its ``message`` is the size of a
            layer's output. Latency, bandwidth and the other costs hold for the whole pipeline.

    Raises:
        TypeError, ValueError: ``layers`` is not a positive integer, a cost has another number of entries, or the costs
            of all layers add up to more than a float can hold.
    """

    layers: int
    costs: PipelineCosts

    def __post_init__(self) -> None:
        if not isinstance(self.layers, int) or isinstance(self.layers, bool):
            raise TypeError(f"layers must be an integer, not {self.layers!r}")
        if self.layers < 1:
            raise ValueError(f"layers is {self.layers}: a model has at least one layer")
        for name in (*_SUMMED, "message"):
            value = getattr(self.costs, name)
            if isinstance(value, Sequence) and len(value) != self.layers:
                raise ValueError(
                    f"{name} has {len(value)} numbers, but there are {self.layers} layers: give one, or {self.layers}"
                )

        values = [getattr(self.costs, name) or 0.0 for name in _SUMMED]
        total = sum(sum(value) if isinstance(value, Sequence) else value * self.layers for value in values)
        if not isfinite(total):
            raise ValueError("the costs of all layers add up to more than a float can hold: give them in larger units")

    def of_stages(self, sizes: Sequence[int], copies: int = 1) -> PipelineCosts:
        """Return the costs of stages that consist of consecutive layers.

        The durations and the memory of a stage's layers are summed. The message of a stage is that of its last layer.

        Args:
            sizes: for each stage, its number of layers, which is at least 1.
            copies: how many times the stages exist: 2 for the two pipelines of DualPipe, otherwise 1.

        Raises:
            ValueError: a size is below 1, or the sizes do not sum to the number of layers.
        """
        if any(size < 1 for size in sizes) or sum(sizes) != self.layers:
            raise ValueError(f"stages of {list(sizes)} layers: each has at least one, together they have {self.layers}")
        given = {name: self.costs.each(name, self.layers) for name in _SUMMED}
        summed = {name: [sum(values[start:stop]) for start, stop in _bounds(sizes)] for name, values in given.items()}
        message = self.costs.each("message", self.layers)
        summed["message"] = [message[stop - 1] for _, stop in _bounds(sizes)]
        changed: dict[str, Any] = {name: tuple(values) * copies for name, values in summed.items()}
        return replace(self.costs, **changed)

    def work(self) -> list[float]:
        """Return, for each layer, how long its forward and its full backward take together."""
        pairs = zip(self.costs.each("forward", self.layers), self.costs.each("full_backward", self.layers), strict=True)
        return [forward + backward for forward, backward in pairs]


def _bounds(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield, for each stage, the index of its first layer and the index after its last layer."""
    start = 0
    for size in sizes:
        yield start, start + size
        start += size
