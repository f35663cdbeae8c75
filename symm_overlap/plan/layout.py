"""Where a plan's buffers are placed in one half of the workspace. It is derived from the plan, so the two agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .plan import Life, Plan

ALIGNMENT = 256
"""In bytes. Buffers, and units that are not packed, start at multiples of it, which suits every device and matmul."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the buffers of life CALL are placed in a half of the workspace. The layout is the same on every rank.

    Layouts are compared by identity. A layout is computed once for a plan, and every call uses it as the key under
    which it looks up what it knows about that plan.

    Attributes:
        nbytes: the size of all these buffers together.
        offset: for each buffer, the byte at which its unit 0 starts.
        stride: for each buffer, the bytes from the start of one unit to that of the next.
    """

    nbytes: int
    offset: Mapping[str, int]
    stride: Mapping[str, int]


def layout(plan: Plan, unit_bytes: Mapping[str, int]) -> Layout:
    """Lay out the buffers of life CALL, one after another, each starting at a multiple of 256 bytes.

    The units of a buffer start at multiples of 256 bytes too, unless a step accesses several units as one region. Then
    the units are packed, because that step sees them as one tensor.

    Args:
        plan: the plan of any rank.
        unit_bytes: for each buffer of life CALL that the plan touches, the size of its largest unit in bytes. Other
            buffers may be named and are ignored.

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
                f"unit_bytes[{name!r}] is {unit_bytes.get(name)}: give the bytes of one unit, at least 0, since "
                f"{plan.op} keeps this buffer in the workspace"
            )
        offset[name], stride[name] = end, size if name in packed else _aligned(size)
        end = _aligned(end + count * stride[name])
    return Layout(end, offset, stride)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
