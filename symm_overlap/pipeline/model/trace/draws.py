"""Random numbers of Python and NumPy that a model draws between its layers. A trace would keep the first draw for ever.

Whole modules may draw them, since they are called when the stages run.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Draws:
    """Notes the states of the generators before and after a model is called.

    Attributes:
        ends: the states afterwards, pickled, of the generators from which numbers were drawn outside of whole modules,
            by name. Another thread may have drawn them. The model draws the same numbers if it is called again.
    """

    def __init__(self) -> None:
        self.ends: dict[str, bytes] = {}
        self._before = _states()

    def begin(self) -> None:
        """Note the states before the model is called."""
        self._before = _states()

    def end(self) -> None:
        """Note the states after the model was called."""
        before, after = _pickled(self._before), _pickled(_states())
        self.ends = {name: state for name, state in after.items() if state != before.get(name, state)}

    def undo(self) -> None:
        """Set the generators back to the states from before the call."""
        _restore(self._before)

    @contextmanager
    def of_whole_module(self) -> Iterator[None]:
        """Ignore what is drawn in the body."""
        before = _states()
        try:
            yield
        finally:
            _restore(before)


def _states() -> dict[str, Any]:
    found: dict[str, Any] = {"Python's random": random.getstate()}
    if "numpy.random" in sys.modules:
        found["numpy.random"] = sys.modules["numpy.random"].get_state(legacy=False)
    return found


def _pickled(states: dict[str, Any]) -> dict[str, bytes]:
    return {name: pickle.dumps(state) for name, state in states.items()}


def _restore(states: dict[str, Any]) -> None:
    random.setstate(states["Python's random"])
    if "numpy.random" in states:
        sys.modules["numpy.random"].set_state(states["numpy.random"])
