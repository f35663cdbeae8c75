"""Let ranks agree on what they recorded, since ranks that share parameters must gather them in the same order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ..._torch import is_fake
from .trace import Layer, Trace

_TIMES = ("gather", "copy_out", "copy_in", "reduce")
_NONE: dict[str, Any] = dict.fromkeys(_TIMES, 0.0)


def agreed(trace: Trace, policy: str, options: str, groups: Iterable[dist.ProcessGroup]) -> Trace | str:
    """Return the trace with the times of the slowest rank, the same on all ranks. Collective.

    Args:
        options: how the model communicates.
        groups: the groups whose ranks share the parameters, one for each dimension of each mesh, in the same order on
            all ranks.

    Returns:
        The trace, or the reason why there is none: ranks differ in what they ran, in the policy or in the options.
    """
    mine: tuple[Any, list[float]] = (_shape(trace, policy, options), _times(trace))
    for group in groups:
        if is_fake(group):
            continue
        others: list[Any] = [None] * group.size()
        dist.all_gather_object(others, mine, group=group)
        different = next((rank for rank, (shape, _) in enumerate(others) if shape != others[0][0]), None)
        if different is None:
            mine = (mine[0], [max(each) for each in zip(*(times for _, times in others), strict=True)])
        else:
            mine = (_difference(others, different, group), [])
    if isinstance(mine[0], str):
        return mine[0]
    return _with_times(trace, mine[1])


def _shape(trace: Trace, policy: str, options: str) -> tuple[Any, ...]:
    """Return the parts of a recording that must be the same on all ranks."""
    layers = tuple(_with(layer, _NONE) for layer in trace.layers)
    return policy, options, layers, tuple(call._replace(compute=0.0) for call in trace.calls)


def _difference(others: list[Any], rank: int, group: dist.ProcessGroup) -> str:
    shapes = [others[0][0], others[rank][0]]
    reason = next((shape for shape in shapes if isinstance(shape, str)), None)
    if reason is not None:
        return reason
    names = ("policy", "communication", "sharded modules", "order in which modules ran")
    name = next(name for name, first, second in zip(names, *shapes, strict=True) if first != second)
    first, second = (dist.get_global_rank(group, each) for each in (0, rank))
    return f"ranks {first} and {second} differ in the {name}"


def _times(trace: Trace) -> list[float]:
    of_layers = [getattr(layer, name) for layer in trace.layers for name in _TIMES]
    return of_layers + [call.compute for call in trace.calls]


def _with_times(trace: Trace, times: list[float]) -> Trace:
    left = iter(times)
    layers = [_with(layer, {name: next(left) for name in _TIMES}) for layer in trace.layers]
    calls = [call._replace(compute=next(left)) for call in trace.calls]
    return Trace(tuple(layers), tuple(calls))


def _with(layer: Layer, times: dict[str, Any]) -> Layer:
    return replace(layer, **times)
