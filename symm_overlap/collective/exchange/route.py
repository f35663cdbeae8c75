"""A route: what is decided once for all calls of one problem, in one group, under the same settings."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Any

from ...plan import Layout, Plan
from ...runtime import Backend, GroupState, Lane
from ..choice import Choice

MOST_ROUTES = 4096  # of one group; a program that takes more begins anew


class Route:
    """How a call is carried out.

    Attributes:
        backend, choice: see `symm_overlap.collective.exchange.call.Call`.
        lane: None where the group has no peers to reach.
        place: which rendezvous of the group the gathered tensor's memory had, 0 for any other memory; and where the
            tensor begins there, if that is the same on every rank.
        digest: what the hashes of these calls have in common; 0 where nothing is compared.
        comparing: whether every call is compared in words.
        plans: those that exchanges run for these calls.
        layouts: a plan of these calls, by its id, and where its buffers lie in the workspace.
    """

    __slots__ = ("backend", "choice", "comparing", "digest", "lane", "layouts", "place", "plans")

    def __init__(
        self, backend: Backend, choice: Choice, lane: Lane | None, place: tuple[int, int], digest: int, comparing: bool
    ) -> None:
        self.backend, self.choice, self.lane = backend, choice, lane
        self.place, self.digest, self.comparing = place, digest, comparing
        self.plans: dict[Hashable, Plan] = {}
        self.layouts: dict[int, tuple[Plan, Layout]] = {}


def keep_route(state: GroupState, key: Hashable, route: Route) -> None:
    """Let calls of this key take ``route`` from now on. It dies with the group: one made again has a state of its own,
    even under the same name.
    """
    if len(state.routes) >= MOST_ROUTES:
        state.routes.clear()
    state.routes[key] = route


def digest_of(*call: Any) -> int:
    """64 bits that are the same in every process: Python's own hashes of strings are not."""
    words = [str(word) for word in call]
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "little")
