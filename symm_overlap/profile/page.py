"""Recordings as a page of HTML, which needs no other file: the report, and timelines of the calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from ..plan import draw
from .compare import compare, measured_timeline
from .exposure import kinds_of_calls
from .recording import Recording
from .report import describe, report

_HEAD = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>symm_overlap: what is exposed</title>
<style>body{font-family:sans-serif;margin:2em}pre{font-size:12px;overflow-x:auto}h2{font-size:16px}
figure{margin:1em 0;overflow-x:auto}</style></head><body>
<h1>What is exposed</h1>
"""


_WIDTH = 1400  # of the timelines, in pixels


def page(recordings: Sequence[Recording]) -> str:
    """Return the text of a page of HTML.

    For each kind of call, it shows the median call as it was recorded and, below it, as the cost model predicts it.
    Pointing at a box shows its step.
    """
    body = [_HEAD, f"<pre>{escape(report(recordings))}</pre>"]
    for recording in recordings:
        body += _timelines(recording)
    return "\n".join([*body, "</body></html>", ""])


def _timelines(recording: Recording) -> Iterator[str]:
    for each in kinds_of_calls(recording):
        name = f"{describe(each)}, {recording.source}, {recording.device}"
        measured = measured_timeline(recording, each.index, f"measured: {name}")
        if measured is None:
            continue
        yield f"<h2>{escape(name)}</h2>"
        yield f"<figure>{draw.svg(measured, _WIDTH)}</figure>"
        compared = compare(recording, each.index)
        if compared is not None:
            yield f"<figure>{draw.svg(compared.timeline, _WIDTH)}</figure>"
            yield f"<pre>{escape(str(compared))}</pre>"
