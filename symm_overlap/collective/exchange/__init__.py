"""Exchanges: how the parts of a collective travel. Each module has the same three functions; the chooser picks one."""

from __future__ import annotations

from types import ModuleType

from ... import _C
from . import c10d, fake, fused, noted, planned, single
from .call import Call
from .fused.flagged import raise_kernel_failures
from .needs import Needs
from .peers import Peers
from .ranges import Ranged, called
from .repeated import Repeatable

__all__ = ["Call", "Needs", "Peers", "Repeatable", "called", "exchange_of", "raise_kernel_failures"]

_EXCHANGES: dict[str, ModuleType] = {
    "single": single,
    "planned": planned,
    "fused": fused,
    "c10d": c10d,
    "fake": fake,
}


def exchange_of(call: Call) -> ModuleType | Ranged:
    """Return the exchange that was chosen for a call. `planned` documents its functions."""
    chosen = _EXCHANGES[call.choice.exchange]
    if call.settings.needs is not None and chosen not in (planned, fused):
        chosen = noted
    return Ranged(chosen, call) if _C.profiled() else chosen
