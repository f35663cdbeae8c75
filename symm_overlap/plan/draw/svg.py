"""A timeline as an SVG image: a row for each stream of each rank, a bar for each step, an arrow for each signal."""

from __future__ import annotations

from html import escape

from ..kinds import kind
from ..timeline import Event, Timeline

ROW, GAP, RANK_GAP, MARGIN, TOP = 22, 4, 14, 130, 34


def svg(timeline: Timeline, width: int = 1200) -> str:
    """The image's text. Time runs to the right; pointing at a bar shows its step; a pale bar is a wait.

    Args:
        width: of the image, in pixels.
    """
    rows = _rows(timeline)
    height = max(rows.values(), default=TOP) + ROW + GAP + 24
    scale = (width - MARGIN - 10) / (timeline.makespan or 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<defs><marker id="tip" markerWidth="6" markerHeight="6" refX="5" refY="3" orient="auto">'
        '<path d="M0,0 L6,3 L0,6 z" fill="#54a24b"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="18" font-size="13">{escape(str(timeline).splitlines()[0])}</text>',
    ]
    for (rank, stream), top in rows.items():
        parts.append(f'<text x="8" y="{top + 15}">rank {rank}  {escape(stream)}</text>')
        parts.append(f'<line x1="{MARGIN}" y1="{top + ROW}" x2="{width - 10}" y2="{top + ROW}" stroke="#eeeeee"/>')
    for event in timeline.events:
        parts.append(_bar(event, MARGIN + event.start * scale, rows[event.at.rank, event.at.step.stream], scale))
    for signal, wait in timeline.signals:
        x1, y1 = MARGIN + signal.start * scale, rows[signal.at.rank, signal.at.step.stream] + ROW / 2
        x2, y2 = MARGIN + wait.end * scale, rows[wait.at.rank, wait.at.step.stream] + ROW / 2
        parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#54a24b" stroke-width="0.6" '
            'opacity="0.7" marker-end="url(#tip)"/>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _rows(timeline: Timeline) -> dict[tuple[int, str], int]:
    """The top of each stream's row; the streams of a rank stand together."""
    rows: dict[tuple[int, str], int] = {}
    top, last = TOP, None
    for rank, stream in sorted({(event.at.rank, event.at.step.stream) for event in timeline.events}):
        top += RANK_GAP if last not in (None, rank) else 0
        rows[rank, stream], last = top, rank
        top += ROW + GAP
    return rows


def _bar(event: Event, x: float, top: int, scale: float) -> str:
    step, width = event.at.step, (event.end - event.start) * scale
    title = f"{step}\n{event.start:.3f} to {event.end:.3f} ms, waited {event.waited:.3f} ms"
    bar = (
        f'<rect x="{x:.1f}" y="{top}" width="{max(width, 1):.1f}" height="{ROW}" rx="2" stroke="white" '
        f'stroke-width="0.5" fill="{kind(step.kind).colour}"><title>{escape(title)}</title></rect>'
    )
    name = step.kind if step.chunk is None else f"{step.kind} {step.chunk[0]}.{step.chunk[1]}"
    if width < 6 * len(name):
        return bar
    return bar + f'<text x="{x + 3:.1f}" y="{top + 15}" pointer-events="none">{escape(name)}</text>'
