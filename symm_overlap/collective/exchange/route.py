"""A route: the decisions that are made once for all calls of one problem, in one group, under the same settings."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from functools import lru_cache
from typing import Any

from ...plan import Layout, Plan
from ...runtime import Backend, GroupState, Lane
from ..choosing.choice import Choice

MOST_ROUTES = 4096  # for one group; if a program uses more, all of them are dropped


class Route:
    """How calls are carried out.

    Attributes:
        backend, choice: see `symm_overlap.collective.exchange.call.Call`.
        lane: the lane of these calls; None if the group has no peers.
        place: (number of the rendezvous of the gathered tensor's symmetric memory, or 0 for any other memory; offset of
            the tensor in it, if it has to be the same on every rank).
        digest: the part that the hashes of these calls have in common; 0 if calls are not compared.
        comparing: whether the text of every call is compared between ranks.
        plans: the plans that exchanges run for these calls.
        kernel: what the path "fused" knows about the kernel of these calls; None before the first of them.
        layouts: for the id of each plan, the plan and the layout of its buffers in the workspace.
    """

    __slots__ = ("backend", "choice", "comparing", "digest", "kernel", "lane", "layouts", "place", "plans")

    def __init__(
        self, backend: Backend, choice: Choice, lane: Lane | None, place: tuple[int, int], digest: int, comparing: bool
    ) -> None:
        self.backend, self.choice, self.lane = backend, choice, lane
        self.place, self.digest, self.comparing = place, digest, comparing
        self.plans: dict[Hashable, Plan] = {}
        self.kernel: Any = None
        self.layouts: dict[int, tuple[Plan, Layout]] = {}


def keep_route(state: GroupState, key: Hashable, route: Route) -> None:
    """Use ``route`` for calls of this key from now on.

    The route ends with its group: a new group has a state of its own, even under the same name.
    """
    if len(state.routes) >= MOST_ROUTES:
        state.forget_routes()
    state.routes[key] = route


@lru_cache(maxsize=4096, typed=True)  # typed: 1 and True are equal, but differ in words
def digest_of(*call: Hashable) -> int:
    """Return a 64-bit hash that is the same in every process, unlike Python's own hashes of strings."""
    words = [str(word) for word in call]
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "little")
