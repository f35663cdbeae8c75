"""Random numbers of Python and NumPy that a model draws between its layers. A trace would keep the first draw for ever.

Whole modules may draw them, since they are called when the stages run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .trace_error import PassedError


class Draws:
    """Notes the state of the generators before a model is traced, and compares it with the state afterwards."""

    def __init__(self) -> None:
        self._before = _state()

    def begin(self) -> None:
        """Note the state before the model is called."""
        self._before = _state()

    def end(self) -> None:
        """Check the state after the model was called.

        Raises:
            PassedError: the model has drawn numbers outside of whole modules.
        """
        for name, state in _state().items():
            if state != self._before.get(name, state):
                raise PassedError(
                    f"the model draws random numbers from {name} between its layers. They would be drawn only once, "
                    "while the model is cut, and could differ between ranks. Draw them in a layer, or before the call "
                    "and pass them in the batch"
                )

    def undo(self) -> None:
        """Set the generators back to the state from before the call."""
        _restore(self._before)

    @contextmanager
    def of_whole_module(self) -> Iterator[None]:
        """Ignore what is drawn in the body."""
        before = _state()
        try:
            yield
        finally:
            _restore(before)


def _state() -> dict[str, Any]:
    found: dict[str, Any] = {"Python's random": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy.random"] = (kind, tuple(keys.tolist()), *rest)
    return found


def _restore(state: dict[str, Any]) -> None:
    random.setstate(state["Python's random"])
    if "numpy.random" in state:
        sys.modules["numpy"].random.set_state(state["numpy.random"])
