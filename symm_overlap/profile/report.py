"""Recordings as text: what was hidden, and what was exposed."""

from __future__ import annotations

from collections.abc import Sequence

from .compare import compare
from .exposure import Calls, Exposure, exposure, kinds_of_calls
from .recording import Recording

_COLUMNS = (
    ("total", "total"),
    ("compute", "compute"),
    ("exposed", "exposed"),
    ("= sums", "sums"),
    ("copies", "copies"),
    ("library", "library"),
    ("waits", "waits"),
    ("other", "other"),
    ("idle", "idle"),
    ("moving", "moving"),
    ("hidden", "share_hidden"),
    ("pauses", "pauses"),
    ("first", "first"),
    ("last", "last"),
    ("host", "host"),
)

LEGEND = """\
milliseconds, the median of all calls of a kind
  total    on a GPU, from the start of the first activity that the call launched to the end of the last; on a CPU, from
           the start of the call to its end
  compute  when arithmetic of the model ran on the device; all other time is exposed
  exposed  total - compute: sums of partial results, copies, collectives of the library, waits, other work, or idle, if
           nothing ran; a moment counts for the first of these that ran
  moving   when copies or collectives ran; hidden: the share of that time beside compute; pauses: when none ran,
           between the first and the last
  first    before the first compute; last: after the last compute
  host     until the host had issued everything; on a CPU, the whole call"""


NOTHING = "neither an activity of a GPU nor a call of symm_overlap was recorded"


def report(recordings: Sequence[Recording], *, steps: bool = False) -> str:
    """Return the recordings as text: one sentence if there are none.

    Args:
        steps: whether to compare the steps of each kind of call with the prediction of the cost model.
    """
    if not recordings:
        return NOTHING
    parts = [_recording(each, steps) for each in recordings]
    if any(each.calls for each in recordings):
        parts.append(LEGEND)
    return "\n\n".join(parts)


def _recording(recording: Recording, steps: bool) -> str:
    rank = "" if recording.rank is None else f"rank {recording.rank}, "
    process = "" if recording.process is None else f"process {recording.process}, "
    lines = [f"{recording.source}: {rank}{process}{recording.device}"]
    if not recording.on_cpu:  # on a CPU, only the steps of calls are known, and not what the model computes
        lines += _overall(exposure(recording.activities))
    kinds = kinds_of_calls(recording)
    lines += _without_steps(recording)
    if kinds:
        lines.append(f"{'calls':>9}{header()}")
    predicted = {each.index: compare(recording, each.index) for each in kinds if steps}
    for each in kinds:
        lines.append(f"  {describe(each)}")
        lines.append(f"{each.count:>9}{figures(each.median)}")
        lines += [f"    {line}" for line in str(predicted.get(each.index) or "").splitlines()]
    if steps and not any(predicted.values()):
        lines.append("  no steps are compared: the cost model predicts calls in chunks on GPUs, and none of these")
    return "\n".join(lines)


def _without_steps(recording: Recording) -> list[str]:
    """Return a line about the calls of which only the beginning and the end are known."""
    calls = [call for call, own in zip(recording.calls, recording.activities_of_calls, strict=True) if not own]
    if not recording.calls:
        return ["  no call of symm_overlap was recorded"]
    if not calls:
        return []
    spent = sum(call.end - call.start for call in calls)
    names = ", ".join(dict.fromkeys(call.text.partition("(")[0] for call in calls))
    why = " (calls on c10d, and in groups of one rank, run no steps of a plan)" if recording.on_cpu else ""
    return [f"  no steps were recorded of {len(calls)} calls, on the host {spent:.3f} ms in all: {names}{why}"]


def _overall(spent: Exposure) -> list[str]:
    """Return the whole recording in words. Time in which nothing ran is not called exposed: it may have any reason."""
    if not spent.total:
        return ["  the device did nothing"]
    share = spent.share_hidden
    moved = "nothing moved"
    if share is not None:
        moved = f"copies and collectives {spent.moving:.3f} ms, {share:.0%} of it hidden"
    exposed = spent.sums + spent.copies + spent.library + spent.waits
    return [
        f"  {spent.total:.3f} ms: compute {spent.compute:.3f} ms ({spent.compute / spent.total:.0%}); {moved}",
        f"  exposed communication {exposed:.3f} ms: sums {spent.sums:.3f}, copies {spent.copies:.3f}, "
        f"collectives {spent.library:.3f}, waits {spent.waits:.3f}; other work {spent.other:.3f} ms, "
        f"idle {spent.idle:.3f} ms",
    ]


def describe(calls: Calls) -> str:
    """Return a kind of calls in words: its arguments, and how it was carried out."""
    words, what = f"{calls.call.text}, {calls.call.fact('world')} ranks", calls.call.what
    if what is None:
        return words
    _, choice = what
    return f"{words}, {choice.path if choice.whole else choice.candidate.name}"


def header() -> str:
    """Return the names of the columns of `figures`."""
    return "".join(f"{name:>9}" for name, _ in _COLUMNS)


def figures(spent: Exposure) -> str:
    """Return where the time went as one row; `LEGEND` explains the columns."""
    return "".join(f"{_figure(getattr(spent, attribute), attribute):>9}" for _, attribute in _COLUMNS)


def _figure(value: float | None, attribute: str) -> str:
    if value is None or attribute == "share_hidden":
        return "-" if value is None else f"{value:.0%}"
    return f"{value:.3f}"
