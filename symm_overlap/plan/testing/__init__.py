"""Helpers for tests of plans and of what runs them: random delays, and a search for synchronisation without use."""

from .delays import delayed
from .redundant import Synchronisation, redundant, synchronisations, without

__all__ = ["Synchronisation", "delayed", "redundant", "synchronisations", "without"]
