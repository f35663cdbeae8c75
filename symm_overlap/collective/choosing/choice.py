"""The result of the chooser: a path, how it is carried out, the reason, and the predicted times of the candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .candidates import Candidate, parts_in_words


@dataclass(frozen=True)
class Prediction:
    """The cost model's prediction for one candidate. Times are in milliseconds.

    Attributes:
        candidate: what is predicted.
        total: from the start of the call on all ranks to its end.
        matmul: the matmuls, one after the other, each with its last wave. In chunks, copies beside them slow them down
            if memory cannot serve both.
        moves: the collective, or the copies, alone. The time of additions is included.
        meets: signals, waits and barriers, one after the other.
        host: until the host has issued everything. The host works ahead of the device.
    """

    candidate: Candidate
    total: float
    matmul: float
    moves: float
    meets: float
    host: float

    @property
    def path(self) -> str:
        """The path of the candidate."""
        return self.candidate.path


def prediction_table(device: str, predictions: Sequence[Prediction]) -> str:
    """Return a table of the candidates, one line for each."""
    title = f"  predicted in ms for {device}"
    width = max(32, len(title))
    lines = [title.ljust(width) + "".join(f"{name:>9}" for name in _COLUMNS)]
    for each in predictions:
        times = (getattr(each, name) for name in _COLUMNS)
        lines.append(f"    {each.candidate.name}".ljust(width) + "".join(f"{time:>9.3f}" for time in times))
    return "\n".join(lines)


_COLUMNS = ("total", "matmul", "moves", "meets", "host")


@dataclass(frozen=True)
class Choice:
    """A path, how it is carried out, and why it was chosen.

    Attributes:
        path: see `symm_overlap.collective.choosing.chooser`.
        exchange: "single", "planned", "fused", "c10d" or "fake".
        reason: why the path was chosen, in words.
        chunks: how many chunks each rank's part is cut into.
        whole: whether the call is one collective and one matmul, without parts.
        one_shot: whether every rank sums all of a small all-reduce, so that the ranks synchronise once instead of
            twice.
        compute: compute streams; the first is the caller's.
        copy: the first stream of the copies.
        copies, span: how many such streams take turns, and how many peers' parts one matmul covers at most; see
            `symm_overlap.collective.planners.builder`.
        predictions: the predicted times of the candidates, if a model of the device decided.
        model: the name of that model.
        doubt: why the prediction for the path fused did not count, or an empty string.
    """

    path: str
    exchange: str
    reason: str
    chunks: int = 1
    whole: bool = False
    one_shot: bool = False
    compute: tuple[str, ...] = ("compute0",)
    copy: str = "compute0"
    copies: int = 1
    span: int = 1
    predictions: tuple[Prediction, ...] = ()
    model: str = ""
    doubt: str = ""

    @property
    def candidate(self) -> Candidate:
        """The path with its granularity, without the streams."""
        return Candidate(self.path, self.chunks, self.span)

    def __str__(self) -> str:
        how = " (one shot: every rank sums all of it)" if self.one_shot else ""
        if self.path in ("pipelined", "fused", "c10d") and not self.whole:
            streams = tuple(dict.fromkeys((*self.compute, self.copy, *[f"{self.copy}1"] * (self.copies - 1))))
            a_rank = "" if self.span > 1 else " a rank"
            how = f" ({parts_in_words(self.chunks, self.span)}{a_rank}, streams: {', '.join(streams)})"
        table = "\n" + prediction_table(self.model, self.predictions) if self.predictions else ""
        if self.doubt:
            table += f"\n    {self.doubt}"
        return f"{self.path}{how}: {self.reason}{table}"
