"""Exchanges: how the parts of a collective travel. Each module has the same three functions; the chooser names one."""

from __future__ import annotations

from types import ModuleType

from . import c10d, fake, fused, planned, single
from .call import Call, Peers

__all__ = ["Call", "Peers", "exchange_of"]

_EXCHANGES: dict[str, ModuleType] = {
    "single": single,
    "planned": planned,
    "fused": fused,
    "c10d": c10d,
    "fake": fake,
}


def exchange_of(call: Call) -> ModuleType:
    """The exchange that was chosen for a call: `planned` documents its functions."""
    return _EXCHANGES[call.choice.exchange]
