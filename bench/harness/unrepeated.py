"""Calls that do not repeat an earlier one, to measure what repeating saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from symm_overlap.collective.exchange import Peers, Repeatable


@contextmanager
def unrepeated() -> Iterator[None]:
    """Let every call of an op take the usual way, as the first call of its kind does."""
    with mock.patch.object(Repeatable, "call", _usually):
        yield


def _usually(op: Repeatable, peers: Peers, args: Sequence[Any], kwargs: Mapping[str, Any], key: bytes | None) -> Any:
    return op.eager(peers, *args, **kwargs)
