"""What a program may do around its calls: make room before the first one, and ask whether one has failed."""

from __future__ import annotations

from operator import index

import torch

from ..runtime import TRAITS, backend_of, direct_access
from ..settings import current
from .arguments import Group, group_name
from .exchange import Peers
from .exchange.route import digest_of


def prepare(group: Group, nbytes: int, device: torch.device | str = "cpu") -> None:
    """Make the workspace of the current lane before it is needed. Collective.

    Ops make and grow their workspace themselves; a program that captures CUDA graphs, or that wants no allocation in
    its steps, does it here once.

    Args:
        nbytes: the largest workspace of one call, in bytes: of an all-gather the shard, of a matmul-reduce-scatter the
            whole product, of an all-reduce the product and a ``world``-th of it. Each chunk is rounded up to 256 bytes.
            Alike on every rank. Twice this is allocated, since the workspace is double buffered.
        device: "cpu" or "cuda".

    Raises:
        ValueError: ``nbytes`` is negative, there is no such group, or no such device.
        TypeError: ``nbytes`` is no int.
        RuntimeError: there is no room for it, on this rank or on another, or an earlier call on the lane failed.
    """
    if index(nbytes) < 0:
        raise ValueError(f"prepare: nbytes is {nbytes}: give a size from 0 on")
    place = torch.device(device)
    if place.type not in TRAITS:
        raise ValueError(f"prepare: device is {str(device)!r}: allowed are {', '.join(TRAITS)}")
    try:
        place = backend_of(place.type).resolve(place)
    except ValueError as error:
        raise ValueError(f"prepare: {error}") from None
    settings = current()
    peers = Peers(group_name(group), settings)
    if peers.world == 1 or peers.state.fake or not direct_access(peers.state, place, settings.comparing):
        return  # these ranks have no use for a workspace
    lane = peers.state.lane(peers.group, place, settings.lane_index)
    lane.reserve(max(1, nbytes), settings.seconds, peers.hash_of(digest_of("prepare", nbytes)))


def raise_failures() -> None:
    """Raise if a wait of an earlier call on a GPU has failed, as far as the host knows by now.

    A kernel cannot raise: a wait past its deadline fills the outputs with NaN and leaves a record, which the next call
    on the lane, or this, turns into an exception. ``torch.cuda.synchronize()`` first to know about all calls. On CPU
    the call itself has raised, and this does nothing.

    Raises:
        torch.distributed.DistBackendError: it names op, group, rank, peer, channel, and the expected and the found
            epoch.
    """
    for kind in TRAITS:
        backend_of(kind).raise_failures()
