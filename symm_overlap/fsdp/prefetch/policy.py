"""The policies of `plan_prefetch`: how far ahead layers are gathered."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for ending, base in (("iB", 1024), ("B", 1000))
}


def bytes_of(size: int | str) -> int:
    """Return a number of bytes from an integer or from a text such as ``"512MiB"``, ``"1.5 GiB"``, ``"2GB"``.

    Raises:
        ValueError: ``size`` is neither, or it is negative.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)?", str(size).strip())
    if match is None or (match[2] or "") not in _UNITS:
        raise ValueError(f"size {size!r}: give bytes, as a number from 0 or as a text such as '512MiB' or '2GB'")
    return int(Fraction(match[1]) * _UNITS[match[2] or ""])


@dataclass(frozen=True)
class Depth:
    """Every layer gathers the next ``layers`` layers ahead.

    With 0, no prefetch is set in forward, and in backward nothing is gathered ahead, not even by torch's default.
    """

    layers: int

    def __post_init__(self) -> None:
        if self.layers < 0:
            raise ValueError(f"depth={self.layers}: give the number of layers that are gathered ahead, 0 or more")

    def __str__(self) -> str:
        return f"depth={self.layers}"


@dataclass(frozen=True)
class Bytes:
    """Every layer gathers ahead as many of the next layers as have at most ``budget`` bytes of parameters together."""

    budget: int | str

    def __post_init__(self) -> None:
        bytes_of(self.budget)

    def __str__(self) -> str:
        return f"bytes={self.budget}"


@dataclass(frozen=True)
class Auto:
    """The simulator chooses the fastest lists.

    Attributes:
        memory: the most bytes that gathered outputs and unsharded parameters may use together; None for no limit.
    """

    memory: int | str | None = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            bytes_of(self.memory)

    @property
    def cap(self) -> int | None:
        """``memory`` in bytes; None for no limit."""
        return None if self.memory is None else bytes_of(self.memory)

    def __str__(self) -> str:
        return "auto" if self.memory is None else f"auto={self.memory}"


Policy = Depth | Bytes | Auto


def policy_of(given: Policy | str) -> Policy:
    """Return a policy from itself or from its text: ``"depth=2"``, ``"bytes=512MiB"``, ``"auto"``, or ``"auto=2GiB"``
    with a cap on memory.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(given, (Depth, Bytes, Auto)):
        return given
    name, equals, value = str(given).replace(" ", "").partition("=")
    if name == "depth" and re.fullmatch(r"\d+", value):
        return Depth(int(value))
    if name == "bytes" and value:
        return Bytes(value)
    if name == "auto" and bool(equals) == bool(value):
        return Auto(value or None)
    raise ValueError(
        f"prefetch policy {given!r}: give 'depth=2', 'bytes=512MiB', 'auto', 'auto=2GiB' (with a cap on memory), or "
        "Depth, Bytes or Auto of symm_overlap.fsdp"
    )
