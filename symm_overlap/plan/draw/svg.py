"""A timeline as an SVG image: a row for each stream of each rank, a box for each step, an arrow for each signal.

Above the rows is a legend of the kinds of steps that occur, and below them a time axis in milliseconds. If a box is too
narrow for its name, the name is written above it and connected to it by a thin line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from ..kinds import kind
from ..timeline import Event, Timeline
from . import labels

ROW, HEAD, RANK_GAP, MARGIN, RIGHT, TOP = 20, 13, 10, 130, 24, 44
ARROW = "#54a24b"


class _Scale:
    """Converts times to horizontal positions in the image: ``left`` is time 0."""

    def __init__(self, timeline: Timeline, width: int) -> None:
        self.left, self.right = MARGIN, width - RIGHT
        self.end = timeline.makespan
        self._pixels = (self.right - self.left) / (self.end or 1.0)

    def x(self, time: float) -> float:
        """Return the horizontal position of a time, in pixels."""
        return self.left + time * self._pixels

    def width(self, event: Event) -> float:
        """Return the width of a step's box, in pixels."""
        return max(1.0, (event.end - event.start) * self._pixels)

    def ticks(self) -> list[float]:
        """Return round times for the axis, 4 to 10 of them unless the whole time is 0."""
        if not self.end:
            return [0.0]
        rough = self.end / 10
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
        return [index * step for index in range(int(self.end / step * (1 + 1e-9)) + 1)]


def svg(timeline: Timeline, width: int = 1200) -> str:
    """Return a timeline as the text of an SVG image. Time runs to the right; pointing at a box shows its step.

    Args:
        timeline: the result of `simulate`. Its title is the first line of the image.
        width: of the image, in pixels.
    """
    scale = _Scale(timeline, width)
    legend, top = _legend(timeline, width)
    rows = _rows(timeline, top)
    bottom = max(rows.values(), default=top) + ROW
    body = [
        f'<rect width="{width}" height="{bottom + 44}" fill="white"/>',
        f'<text x="8" y="17" font-size="13" font-weight="bold">{escape(timeline.title)}</text>',
        f'<text x="8" y="33">{escape(str(timeline).splitlines()[0])}</text>',
        *legend,
        *_axis(scale, top, bottom),
    ]
    for (rank, stream), y in rows.items():
        body.append(f'<text x="8" y="{y + 14}">rank {rank}  {escape(stream)}</text>')
        body.append(f'<line x1="{scale.left}" y1="{y + ROW}" x2="{scale.right}" y2="{y + ROW}" stroke="#eeeeee"/>')
        events = [event for event in timeline.events if (event.at.rank, event.at.step.stream) == (rank, stream)]
        body += [_box(event, scale, y) for event in events]
        body += _labels(events, scale, y, width)
    body += _arrows(timeline, scale, rows)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 44}" '
            'font-family="sans-serif" font-size="11">',
            '<defs><marker id="tip" markerWidth="6" markerHeight="6" refX="5" refY="3" orient="auto">'
            f'<path d="M0,0 L6,3 L0,6 z" fill="{ARROW}"/></marker></defs>',
            *body,
            "</svg>",
            "",
        ]
    )


def _legend(timeline: Timeline, width: int) -> tuple[list[str], int]:
    """Return a coloured square and a name for each kind of step that occurs, and the top of the first row below."""
    parts: list[str] = []
    x, y = 8.0, TOP
    names = list(dict.fromkeys(event.at.step.kind for event in timeline.events))
    for name in names:
        taken = 16 + labels.INSIDE * len(name) + 14
        if x > 8 and x + taken > width:
            x, y = 8.0, y + 16
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="11" height="11" rx="2" fill="{kind(name).colour}"/>')
        parts.append(f'<text x="{x + 16:.1f}" y="{y + 10}" class="legend">{escape(name)}</text>')
        x += taken
    return parts, y + 20


def _rows(timeline: Timeline, top: int) -> dict[tuple[int, str], int]:
    """Return the top of each stream's row. The streams of a rank are next to each other."""
    rows: dict[tuple[int, str], int] = {}
    last = None
    for rank, stream in sorted({(event.at.rank, event.at.step.stream) for event in timeline.events}):
        top += HEAD + (RANK_GAP if last not in (None, rank) else 0)
        rows[rank, stream], last = top, rank
        top += ROW
    return rows


def _axis(scale: _Scale, top: int, bottom: int) -> Iterator[str]:
    """Yield the time axis below all rows, and a vertical line at each of its ticks."""
    y = bottom + 6
    yield f'<line x1="{scale.left}" y1="{y}" x2="{scale.right}" y2="{y}" stroke="#333333"/>'
    for time in scale.ticks():
        x = scale.x(time)
        yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{y + 4}" stroke="#cccccc" stroke-width="0.5"/>'
        yield f'<text x="{x:.1f}" y="{y + 16}" text-anchor="middle" class="tick">{time:g}</text>'
    yield f'<text x="{scale.left}" y="{y + 30}" class="axis">time in ms</text>'


def _box(event: Event, scale: _Scale, top: int) -> str:
    step, width, x = event.at.step, scale.width(event), scale.x(event.start)
    x = min(x, scale.right - width)  # a step at the very end, which takes no time, stays in the image
    title = f"{step}\n{event.start:.3f} to {event.end:.3f} ms, waited {event.waited:.3f} ms"
    box = (
        f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" rx="2" stroke="white" '
        f'stroke-width="0.5" fill="{kind(step.kind).colour}"><title>{escape(title)}</title></rect>'
    )
    text = labels.inside(step, width)
    if text is None:
        return box
    return box + f'<text x="{x + 3:.1f}" y="{top + 14}" pointer-events="none">{escape(text)}</text>'


def _labels(events: list[Event], scale: _Scale, top: int, width: int) -> Iterator[str]:
    """Yield the names of those boxes of a row that are too narrow to hold their names."""
    narrow = [
        (scale.x(event.start), event)
        for event in sorted(events, key=lambda event: (event.start, event.at.call, event.at.index))
        if labels.inside(event.at.step, scale.width(event)) is None
    ]
    for label in labels.above(narrow):
        x = max(scale.left, min(label.x, width - (label.end - label.x)))
        yield (
            f'<line x1="{label.x:.1f}" y1="{top}" x2="{x + 1:.1f}" y2="{top - 3}" stroke="#777777" stroke-width="0.5"/>'
        )
        yield f'<text x="{x:.1f}" y="{top - 4}" font-size="8" class="above">{escape(label.text)}</text>'


def _arrows(timeline: Timeline, scale: _Scale, rows: dict[tuple[int, str], int]) -> Iterator[str]:
    for post, awaits in timeline.signals:
        x1, y1 = scale.x(post.start), rows[post.at.rank, post.at.step.stream] + ROW / 2
        x2, y2 = scale.x(awaits.end), rows[awaits.at.rank, awaits.at.step.stream] + ROW / 2
        yield (
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{ARROW}" stroke-width="0.6" '
            'opacity="0.7" marker-end="url(#tip)"/>'
        )
