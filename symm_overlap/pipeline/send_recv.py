"""Add sends and receives to the integers of a schedule. This is the pass of `lowering.send_recv`, in C++."""

from __future__ import annotations

from .. import _sim
from .lowering import add_send_recv
from .simulation.encoded import Encoded, integers


def encoded_send_recv(encoded: Encoded) -> Encoded:
    """Return the integers of ``add_send_recv(encoded.schedule())``, without creating the actions.

    Raises:
        ValueError: in the same cases as `add_send_recv`.
    """
    lowered = _sim.add_send_recv(encoded)
    if lowered is None:
        add_send_recv(encoded.schedule())  # says why
        raise AssertionError("csrc/sim refuses what lowering.send_recv accepts")
    return encoded._replace(cells=integers(lowered[0]), starts=integers(lowered[1]))
