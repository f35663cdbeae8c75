"""Where a plan's buffers lie in one half of the workspace: derived from the plan, so it cannot disagree with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .plan import Life, Plan

ALIGNMENT = 256
"""Bytes. Buffers, and units that are not packed, start at multiples of it, which suits every device and matmul."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the buffers of life CALL lie in a half of the workspace. It is the same on every rank.

    Compared by identity: it is made once for a plan, and every call looks up what it knows of that plan by it.

    Attributes:
        nbytes: what they take together.
        offset: for each buffer, the byte at which its unit 0 starts.
        stride: for each buffer, the bytes from the start of one unit to that of the next.
    """

    nbytes: int
    offset: Mapping[str, int]
    stride: Mapping[str, int]


def layout(plan: Plan, unit_bytes: Mapping[str, int]) -> Layout:
    """Lay out the buffers of life CALL, one after another, each starting at a multiple of 256 bytes.

    The units of a buffer start at multiples of 256 bytes too, unless a step takes several units as one region: then
    they are packed, since that step sees them as one tensor.

    Args:
        plan: the plan of any rank.
        unit_bytes: for each buffer of life CALL that the plan touches, the bytes of its largest unit. Other buffers
            may be named and are ignored.

    Raises:
        ValueError: the size of a unit is missing or negative.
    """
    units: dict[str, int] = {name: 0 for name, life in plan.buffers.items() if life is Life.CALL}
    packed: set[str] = set()
    for step in plan.steps:
        for region in step.reads + step.writes:
            if region.buffer in units:
                units[region.buffer] = max(units[region.buffer], region.stop)
                if region.stop - region.start > 1:
                    packed.add(region.buffer)
    offset: dict[str, int] = {}
    stride: dict[str, int] = {}
    end = 0
    for name, count in units.items():
        size = unit_bytes.get(name, -1)
        if size < 0:
            raise ValueError(
                f"unit_bytes of {name!r}, which {plan.op} keeps in the workspace, is {unit_bytes.get(name)}"
            )
        offset[name], stride[name] = end, size if name in packed else _aligned(size)
        end = _aligned(end + count * stride[name])
    return Layout(end, offset, stride)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
