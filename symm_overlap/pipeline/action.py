"""One action of a pipeline schedule: one thing that a rank does, written in torch's text format.

``1F0`` is the forward of stage 1 on microbatch 0. ``2SEND_B3`` sends the gradient of stage 2's input on microbatch 3 to
stage 1. ``0UNSHARD`` gathers the parameters of stage 0. ``(0F7;7B3)OVERLAP_F_B`` runs a forward and a backward
together. The text format is that of torch.distributed.pipelining in torch 2.15, whose kinds include those of 2.11 and
2.13. The argument ``dialect`` selects the names that torch 2.5 and the zero-bubble papers use.
"""

from __future__ import annotations

import re
from typing import NamedTuple

FORWARD = "F"
BACKWARD_INPUT = "I"
"""The gradient of a stage's input."""
BACKWARD_WEIGHT = "W"
"""The gradients of a stage's parameters."""
FULL_BACKWARD = "B"
"""Both gradients in one action."""
OVERLAP_F_B = "OVERLAP_F_B"
"""A compound: a forward and a backward that run together. These two are its parts."""
SEND_F = "SEND_F"
RECV_F = "RECV_F"
SEND_B = "SEND_B"
RECV_B = "RECV_B"
WAIT_SEND_F = "WAIT_SEND_F"
WAIT_SEND_B = "WAIT_SEND_B"
UNSHARD = "UNSHARD"
RESHARD = "RESHARD"
REDUCE_GRAD = "REDUCE_GRAD"
WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"

BACKWARDS = (FULL_BACKWARD, BACKWARD_INPUT)
"""The kinds that compute the gradient of a stage's input, which the stage before it needs."""
SENDS = (SEND_F, SEND_B)
RECVS = (RECV_F, RECV_B)
MESSAGES = frozenset({*SENDS, *RECVS})
AWAITED_SENDS = {WAIT_SEND_F: SEND_F, WAIT_SEND_B: SEND_B}
"""For each kind that waits for a send, the kind of the send."""
COMPUTE = frozenset({FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FULL_BACKWARD, OVERLAP_F_B})
COMMUNICATION = MESSAGES | frozenset(AWAITED_SENDS)
WHOLE_STAGE = frozenset({UNSHARD, RESHARD, REDUCE_GRAD, WAIT_REDUCE_GRAD})
"""The kinds that concern a stage's parameters, and therefore have no microbatch."""
KINDS = COMPUTE | COMMUNICATION | WHOLE_STAGE

_TORCH = {kind: kind for kind in KINDS - {OVERLAP_F_B}}
_ZERO_BUBBLE = {kind: kind for kind in _TORCH if kind not in BACKWARDS} | {"B": BACKWARD_INPUT, "BW": FULL_BACKWARD}
DIALECTS = {"torch": _TORCH, "zero-bubble": _ZERO_BUBBLE}
"""For each dialect, the kind that each name in its text stands for.

In "torch", I is the gradient of the input, W is the gradients of the weights, and B is both. In "zero-bubble", the same
three are called B, W and BW, as in torch 2.5 and in the papers on zero-bubble schedules.
"""
_WRITTEN = {dialect: {kind: name for name, kind in names.items()} for dialect, names in DIALECTS.items()}

# Nine digits are enough for every schedule, and Python refuses to convert very long numbers.
_SIMPLE = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{0,9})")
_COMPOUND = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One action of a schedule. It is immutable, can be hashed, and is compared by value.

    Attributes:
        stage: the stage, counted from 0 over all ranks; -1 for a compound, as in torch.
        kind: one of the constants of this module, such as ``FORWARD``.
        microbatch: the microbatch, counted from 0; None for a compound and for the kinds in ``WHOLE_STAGE``.
        parts: the forward and the backward of a compound, in the order in which one thread starts them; empty for
            every other action.
    """

    stage: int
    kind: str
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        return self.text()

    @property
    def leaves(self) -> tuple[Action, ...]:
        """The actions that are not compounds: the parts, or the action itself."""
        return self.parts or (self,)

    def text(self, dialect: str = "torch") -> str:
        """Return the action as text, which `parse` reads in the same dialect.

        Raises:
            ValueError: there is no such dialect.
        """
        if self.kind == OVERLAP_F_B:
            return f"({';'.join(part.text(dialect) for part in self.parts)})OVERLAP_F_B"
        name = _of(_WRITTEN, dialect)[self.kind]
        return f"{self.stage}{name}{'' if self.microbatch is None else self.microbatch}"

    @staticmethod
    def parse(text: str, dialect: str = "torch") -> Action:
        """Return the action that a text stands for. Spaces around the text are ignored.

        This is stricter than torch 2.11 to 2.15, which read the beginning of a text and ignore the rest. For example,
        they read ``3BW1`` as ``3B``.

        Raises:
            ValueError: the whole text is not one action in this dialect, or there is no such dialect.
        """
        names = _of(DIALECTS, dialect)
        stripped = text.strip()
        compound = _COMPOUND.fullmatch(stripped)
        if compound is None:
            return _simple(stripped, names, dialect)
        parts = tuple(_simple(part.strip(), names, dialect) for part in compound[1].split(";"))
        kinds = [part.kind for part in parts]
        if len(kinds) != 2 or FORWARD not in kinds or {*kinds}.isdisjoint(BACKWARDS):
            raise ValueError(
                f"{_short(stripped)} is not an action: OVERLAP_F_B has two parts, a forward and a backward, such as "
                f"{_EXAMPLE.text(dialect)}"
            )
        return compound_of(*parts)


def compound_of(*parts: Action) -> Action:
    """Return the compound of a forward and a backward. As in torch, it has no stage and no microbatch of its own.

    Args:
        parts: the forward and the backward, in the order in which one thread starts them.
    """
    return Action(-1, OVERLAP_F_B, None, parts)


_EXAMPLE = compound_of(Action(0, FORWARD, 7), Action(7, FULL_BACKWARD, 3))


def _of(tables: dict[str, dict[str, str]], dialect: str) -> dict[str, str]:
    """Return the entry of a dialect in one of the tables above."""
    if dialect not in tables:
        raise ValueError(f"there is no dialect {dialect!r} of schedules: it is one of {', '.join(map(repr, tables))}")
    return tables[dialect]


def _simple(text: str, names: dict[str, str], dialect: str) -> Action:
    """Return the action that a text stands for. The text has no spaces around it and is not a compound."""
    match = _SIMPLE.fullmatch(text)
    kind = names.get(match[2]) if match else None
    if match is None or kind is None:
        raise ValueError(_not_an_action(text, names, dialect))
    if kind in WHOLE_STAGE and match[3]:
        raise ValueError(f"{_short(text)} is not an action: {kind} concerns a whole stage, so write {match[1]}{kind}")
    if kind not in WHOLE_STAGE and not match[3]:
        raise ValueError(f"{_short(text)} is not an action: {match[2]} needs a microbatch, such as {text}0")
    return Action(int(match[1]), kind, int(match[3]) if match[3] else None)


def _not_an_action(text: str, names: dict[str, str], dialect: str) -> str:
    """Return an error message: why a text is not an action, and what an action looks like."""
    message = (
        f"{_short(text)} is not an action in the dialect {dialect!r}: expected a stage, a kind and a microbatch, each "
        f"number of at most nine digits, such as 1F0, 0UNSHARD or {_EXAMPLE.text(dialect)}; kinds are "
        f"{', '.join(sorted(names))}"
    )
    match = _SIMPLE.fullmatch(text)
    for other, other_names in DIALECTS.items():
        if match and match[2] in other_names:
            return f"{message}. It is one in the dialect {other!r}"
    return message


def _short(text: str) -> str:
    """Return a text as messages show it: cut to the length that a reader needs to find it."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
