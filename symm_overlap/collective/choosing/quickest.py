"""Which of the candidates whose times were predicted is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .choice import Prediction

REQUIRED_RATIO, REQUIRED_SAVING_MS = 0.95, 0.02
"""A pipelined or fused call is chosen only if its predicted time is at most this fraction of that of the plain
collective and matmul, and shorter by at least so many milliseconds. On an H200 with an emulated link, the model
predicts 0.92 to 1.13 of the time of our plans with 8192 rows, except for one, and 0.73 to 1.22 for few rows
(`bench.model_error`)."""

NEARLY = 1.01
"""If predicted times of pipelined and fused candidates differ by less than this factor, the host's time decides."""


def quickest(predictions: Sequence[Prediction]) -> Prediction:
    """Return the candidate to choose; see `REQUIRED_RATIO` and `NEARLY`."""
    least = min(predictions, key=_handicapped)
    if least.path == "sequential":
        return least
    most = min((each.total for each in predictions if each.path == "sequential"), default=math.inf)
    others = [each for each in predictions if each.path != "sequential" and _handicapped(each) <= most]
    return min((each for each in others if each.total <= NEARLY * least.total), key=lambda each: each.host)


def _handicapped(each: Prediction) -> float:
    """Return the predicted time, to which paths other than ``sequential`` add a handicap; see `REQUIRED_RATIO`."""
    return (
        each.total if each.path == "sequential" else max(each.total / REQUIRED_RATIO, each.total + REQUIRED_SAVING_MS)
    )


def compared(best: Prediction, predictions: Sequence[Prediction]) -> str:
    """Return why the best candidate was chosen, in words."""
    other = min((each for each in predictions if each.path != best.path), key=lambda each: each.total)
    text = f"predicted {best.total:.3f} ms, and {other.total:.3f} ms for {other.candidate.name}"
    if other.total < best.total and best.path == "sequential":
        text += f", which saves less than {1 - REQUIRED_RATIO:.0%} or less than {REQUIRED_SAVING_MS} ms"
    elif other.total < best.total:
        text += ", which takes the host longer"
    alike = min((each for each in predictions if each.path == best.path), key=lambda each: each.total)
    if alike is not best:
        text += f"; {alike.candidate.name} saves less than {NEARLY - 1:.0%} and takes the host longer"
    return text
