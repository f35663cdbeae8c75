"""The starting points of a search: the schedules of all generators, with every number of stages per rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from ..generators import GENERATORS, generate
from ..layer_costs import LayerCosts
from ..partition import Sizes, auto_partition, balanced, even
from ..simulation.activations import Activations
from ..simulation.encoded import Encoded, encode
from .candidate import Candidate, Lowering

PARTITIONS = ("balanced", "even", "auto")
AUTO_STEPS = 100
"""How many partitions are simulated for a start if the simulator chooses the partition."""


class RejectedStart(NamedTuple):
    """A start that is not possible, and why."""

    name: str
    stages_per_rank: int
    why: str


def handcrafted(
    ranks: int, microbatches: int, layers: LayerCosts, stages_per_rank: Sequence[int], partition: str, cap: float
) -> Iterator[Candidate | RejectedStart]:
    """Yield the schedule of each generator with each number of stages per rank, or why it is not possible.

    Of a generator's rejections only one is reported: for its own number of stages if that was requested, otherwise for
    the first number.
    """
    for name in GENERATORS:
        own = generate(name, 2, 4).stages // 2
        reported_count = own if own in stages_per_rank else stages_per_rank[0]
        for count in stages_per_rank:
            try:
                schedule = generate(name, ranks, microbatches, count)
                yield candidate_of(name, encode(schedule), layers, partition, cap)
            except ValueError as error:
                if count == reported_count:
                    yield RejectedStart(name, count, str(error).removeprefix(f"{name}: "))


def candidate_of(name: str, encoded: Encoded, layers: LayerCosts, partition: str, cap: float = inf) -> Candidate:
    """Return a schedule as a candidate, on the stages that ``partition`` chooses for it.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    sizes = _sizes(encoded, layers, partition, cap)
    costs = layers.of_stages(sizes, encoded.pipelines)
    # An empty cell lets a rank wait for one turn when messages are placed. That matters if receives share a stream.
    rows = tuple(
        tuple(code for code in encoded.row(rank) if code or costs.one_receive_stream) for rank in range(encoded.ranks)
    )
    activations = Activations(costs, len(encoded.placement))
    return Candidate(name, rows, encoded, costs, sizes, Lowering.of(costs, encoded.ranks), activations)


def _sizes(encoded: Encoded, layers: LayerCosts, partition: str, cap: float) -> Sizes:
    stages = len(encoded.placement) // encoded.pipelines
    if partition == "even":
        return even(layers.layers, stages)
    if partition == "balanced":
        return balanced(layers, stages)
    try:
        return auto_partition(encoded, layers, memory_cap=cap, steps=AUTO_STEPS).sizes
    except ValueError:
        if layers.layers < stages:
            raise
        return auto_partition(encoded, layers, steps=AUTO_STEPS).sizes  # none fits; the table shows by how much
