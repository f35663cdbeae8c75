"""What runs in a training step, whatever is prefetched: layers, and the calls of torch's hooks on them.

A *layer* is what FSDP2 gathers at once: a module to which ``fully_shard`` was applied. Torch acts when a layer's
forward begins and ends, when the gradient of its output is available, and when the layer's own gradients are. Between
these calls the model computes. `symm_overlap.fsdp.prefetch.recorder` records the calls of a real step.
`layers_in_a_row` creates the calls of layers that run one after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

BEGIN, END_FORWARD = "begin", "end-forward"
PRE_FORWARD, POST_FORWARD = "pre-forward", "post-forward"
PRE_BACKWARD, POST_BACKWARD = "pre-backward", "post-backward"
UNSHARD = "unshard"
END_BACKWARD = "end-backward"


@dataclass(frozen=True)
class Layer:
    """A module that FSDP2 shards.

    Attributes:
        name: the name of the module.
        nbytes: the bytes of its gathered parameters.
        gather, copy_out, copy_in, reduce: how long each takes, in milliseconds.
        reshards: whether its parameters are freed after the forward. By default torch keeps those of the root.
        reshards_after_backward: whether they are freed after the backward.
        gathers_in_backward: whether the backward needs them (``set_unshard_in_backward``).
        has_parameters: whether it has parameters that no inner module shards. Otherwise nothing is gathered for it.
    """

    name: str
    nbytes: int = 1
    gather: float = 0.0
    copy_out: float = 0.0
    copy_in: float = 0.0
    reduce: float = 0.0
    reshards: bool = True
    reshards_after_backward: bool = True
    gathers_in_backward: bool = True
    has_parameters: bool = True


class Call(NamedTuple):
    """A call of torch's hooks.

    Attributes:
        what: ``BEGIN`` and ``END_FORWARD`` when the outermost forward begins and ends; ``PRE_FORWARD``,
            ``POST_FORWARD``, ``PRE_BACKWARD`` and ``POST_BACKWARD`` of a layer; ``UNSHARD`` when its parameters are
            needed at any other place, such as the recomputation of a checkpoint; ``END_BACKWARD`` when a backward pass
            is over.
        layer: the index of the layer, or -1.
        compute: milliseconds that the model has computed since the previous call.
        complete: for ``POST_BACKWARD``, whether gradients are reduced; for ``END_BACKWARD``, whether it is the last one
            of the step.
    """

    what: str
    layer: int = -1
    compute: float = 0.0
    complete: bool = True


@dataclass(frozen=True)
class Trace:
    """The layers of a model, and the calls of one step.

    Attributes:
        optimizer: milliseconds of the optimizer's step; 0 if there is none.
    """

    layers: tuple[Layer, ...]
    calls: tuple[Call, ...]
    optimizer: float = 0.0


def layers_in_a_row(
    layers: Sequence[Layer],
    forward: Sequence[float],
    backward: Sequence[float] = (),
    order: Sequence[int] | None = None,
    optimizer: float = 0.0,
) -> Trace:
    """Create the trace of layers that run one after another in forward, and in reverse order in backward.

    Args:
        forward, backward: for each layer, the milliseconds of its forward and of its backward. If ``backward`` is
            empty, there is no backward.
        order: the layers that run, in order. A layer may be left out or run twice. By default all layers run.

    Raises:
        ValueError: the lengths differ, a time is negative or not finite, or ``order`` names a layer that does not
            exist.
    """
    order = range(len(layers)) if order is None else order
    if len(forward) != len(layers) or len(backward) not in (0, len(layers)):
        raise ValueError(
            f"{len(layers)} layers with {len(forward)} forward and {len(backward)} backward times: give one for each"
        )
    wrong = [time for time in (*forward, *backward, optimizer) if not 0 <= time < math.inf]
    if wrong:
        raise ValueError(f"a time is {wrong[0]}: times are milliseconds, 0 or more and finite")
    if any(not 0 <= index < len(layers) for index in order):
        raise ValueError(f"order {list(order)} of {len(layers)} layers: name layers 0 to {len(layers) - 1}")
    calls = [Call(BEGIN)]
    for index in order:
        calls += [Call(PRE_FORWARD, index), Call(POST_FORWARD, index, forward[index])]
    calls.append(Call(END_FORWARD))
    if backward:
        for index in reversed(order):
            calls += [Call(PRE_BACKWARD, index), Call(POST_BACKWARD, index, backward[index])]
        calls.append(Call(END_BACKWARD))
    return Trace(tuple(layers), tuple(calls), optimizer)
