"""What was hidden and what was exposed: where the time of a call, or of a whole recording, went.

Every moment counts once. It is compute if anything of the model's arithmetic ran on the device. All other moments are
exposed. They belong to the first of these that ran: a sum, a copy, a collective of the library, signals and waits,
other work. If nothing ran, they are idle. A wait by a memory operation of a stream is no activity, so it is idle time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from .intervals import Interval, Intervals, common, total, union, within, without
from .recording import Activity, RecordedCall, Recording

MOVES = ("copy", "collective")
_EXPOSED = {"sum": "sums", "copy": "copies", "collective": "library", "meet": "waits", "other": "other"}


@dataclass(frozen=True)
class Exposure:
    """Where the time went, in milliseconds.

    Attributes:
        total: from the start of the first activity to the end of the last. On a CPU, the whole call.
        compute: when arithmetic of the model ran. For a call on a GPU also arithmetic that the call has not launched.
        sums, copies, library, waits, other: when one of these ran, but nothing that is named before it. "library" is
            collectives of the vendor's library.
        idle: when nothing ran.
        moving: when copies or collectives ran, hidden or not.
        hidden: when copies or collectives ran beside compute.
        first: from the start to the first compute.
        last: from the end of the last compute to the end.
        pauses: between the first copy or collective and the last, when none ran: the link was not used.
        host: until the host had issued everything; 0 if that has no meaning.
    """

    total: float
    compute: float
    sums: float
    copies: float
    library: float
    waits: float
    other: float
    idle: float
    moving: float
    hidden: float
    first: float
    last: float
    pauses: float
    host: float

    @property
    def exposed(self) -> float:
        """The time in which nothing of the model was computed."""
        return self.total - self.compute

    @property
    def share_hidden(self) -> float | None:
        """The share of the time of copies and collectives that compute hid; None if nothing moved."""
        return self.hidden / self.moving if self.moving else None

    def as_dict(self) -> dict[str, float | None]:
        """Return all figures by their names."""
        return {**asdict(self), "exposed": self.exposed, "share_hidden": self.share_hidden}


def exposure(
    activities: Iterable[Activity], span: Interval | None = None, host: float = 0.0, beside: Intervals | None = None
) -> Exposure:
    """Return where the time of these activities went.

    Args:
        span: the first and the last moment that count; by default those of the activities.
        host: see `Exposure.host`.
        beside: when anything computes on the device, if other activities do so too.
    """
    found = list(activities)
    if span is None:
        span = min((each.start for each in found), default=0.0), max((each.end for each in found), default=0.0)
    busy = {role: _when(found, (role,), span) for role in ("compute", *_EXPOSED)}
    if beside is not None:
        busy["compute"] = common(within(beside, span), [span])
    compute, moving = busy["compute"], _when(found, MOVES, span)
    parts: dict[str, float] = {}
    covered = compute
    for role, name in _EXPOSED.items():
        parts[name] = total(without(busy[role], covered))
        covered = union([*covered, *busy[role]])
    length = span[1] - span[0]
    return Exposure(
        total=length,
        compute=total(compute),
        idle=length - total(covered),
        moving=total(moving),
        hidden=total(common(moving, compute)),
        first=compute[0][0] - span[0] if compute else length,
        last=span[1] - compute[-1][1] if compute else 0.0,
        pauses=moving[-1][1] - moving[0][0] - total(moving) if moving else 0.0,
        host=host,
        **parts,
    )


def _when(activities: Iterable[Activity], roles: Sequence[str], span: Interval) -> Intervals:
    return common(union((each.start, each.end) for each in activities if each.role in roles), [span])


def exposure_of_call(recording: Recording, index: int) -> Exposure:
    """Return where the time of one call went."""
    call, activities = recording.calls[index], recording.activities_of_calls[index]
    if recording.on_cpu:
        return exposure(activities, (call.start, call.end), call.end - call.start)
    return exposure(activities, None, call.end - call.start, recording.compute)


@dataclass(frozen=True)
class Calls:
    """All calls of one kind: the same op, sizes, path and options.

    Attributes:
        call: the call whose total is the median, or the one below it.
        index: its index in the recording.
        count: how many there are.
        median: the median of each figure.
    """

    call: RecordedCall
    index: int
    count: int
    median: Exposure


def kinds_of_calls(recording: Recording) -> list[Calls]:
    """Return the kinds of calls of a recording, those that take most time first."""
    kinds: dict[str, list[int]] = {}
    for index, call in enumerate(recording.calls):
        if recording.activities_of_calls[index]:
            kinds.setdefault(call.name, []).append(index)
    found = []
    for indices in kinds.values():
        spent = sorted(
            ((exposure_of_call(recording, index), index) for index in indices), key=lambda each: each[0].total
        )
        middle = spent[(len(spent) - 1) // 2][1]
        found.append(Calls(recording.calls[middle], middle, len(spent), _median([each for each, _ in spent])))
    return sorted(found, key=lambda each: -each.count * each.median.total)


def _median(spent: Sequence[Exposure]) -> Exposure:
    names = [field.name for field in fields(Exposure)]
    return Exposure(**{name: statistics.median(getattr(each, name) for each in spent) for name in names})
