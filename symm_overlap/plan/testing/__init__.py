"""Helpers for tests of plans and of executors: random delays, and a search for synchronisation that is not needed."""

from .delays import delayed
from .redundant import Synchronisation, redundant, synchronisations, without

__all__ = ["Synchronisation", "delayed", "redundant", "synchronisations", "without"]
