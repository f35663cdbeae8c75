"""Exchanges: how the parts of a collective travel. Each module has the same three functions; the chooser picks one."""

from __future__ import annotations

from types import ModuleType

from . import c10d, fake, fused, noted, planned, single
from .call import Call, Peers
from .fused.flagged import raise_kernel_failures
from .needs import Needs

__all__ = ["Call", "Needs", "Peers", "exchange_of", "raise_kernel_failures"]

_EXCHANGES: dict[str, ModuleType] = {
    "single": single,
    "planned": planned,
    "fused": fused,
    "c10d": c10d,
    "fake": fake,
}


def exchange_of(call: Call) -> ModuleType:
    """Return the exchange that was chosen for a call. `planned` documents its functions."""
    chosen = _EXCHANGES[call.choice.exchange]
    return chosen if call.settings.needs is None or chosen in (planned, fused) else noted
