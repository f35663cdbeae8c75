"""What verifiers say: whether what they were given holds, or what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence

MOST_SHOWN = 10


class Verdict:
    """The part of a report that is the same for plans and for pipeline schedules.

    Attributes:
        problems: what is wrong; empty if ``ok``.
    """

    __slots__ = ()
    problems: Sequence[object]

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raise ValueError with the report's text unless it is ok."""
        if self.problems:
            raise ValueError(str(self))

    def listed(self) -> str:
        """How many problems there are, and the first of them."""
        count = len(self.problems)
        more = [f"... and {count - MOST_SHOWN} more"] if count > MOST_SHOWN else []
        return "\n".join([f"{count} problem{'s' * (count != 1)}", *map(str, self.problems[:MOST_SHOWN]), *more])
