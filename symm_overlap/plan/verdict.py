"""The result of a verifier: either there are no problems, or the list of problems."""

from __future__ import annotations

from collections.abc import Sequence

MOST_SHOWN = 10


class Verdict:
    """The part of a report that is the same for plans and for pipeline schedules.

    Attributes:
        problems: the problems that were found; empty if ``ok``.
    """

    __slots__ = ()
    problems: Sequence[object]

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raise ValueError with the text of the report, unless there are no problems."""
        if self.problems:
            raise ValueError(str(self))

    def listed(self) -> str:
        """Return the number of problems and the text of the first ones, at most `MOST_SHOWN`."""
        count = len(self.problems)
        more = [f"... and {count - MOST_SHOWN} more"] if count > MOST_SHOWN else []
        return "\n".join([f"{count} problem{'s' * (count != 1)}", *map(str, self.problems[:MOST_SHOWN]), *more])
