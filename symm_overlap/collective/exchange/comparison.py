"""Compare calls (SYMM_OVERLAP_CHECK=1): do all ranks make the same call, and if not, which calls differ?

Signals carry a hash of the call, so ranks that make different calls always receive an error. With SYMM_OVERLAP_CHECK=1,
every call is also compared in words before it starts, through the group's store. The error message then shows both
calls. If this rank rejects a call, its peers are notified too, because their arguments may differ. The comparison costs
every call some exchanges with the store, so it is off by default. All ranks must use the same setting.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from ..._torch import StoreGoneError, group_store
from ...runtime import Lane, compares, direct_access
from .peers import Peers

REJECTIONS = (TypeError, ValueError, AttributeError, LookupError, NotImplementedError)
"""The exceptions that bad arguments raise, here or in torch."""


def compare_calls(peers: Peers, lane: Lane, call: Callable[[], str]) -> None:
    """Compare ``call()``, which describes a call in words, on all ranks.

    Raises:
        RuntimeError: two ranks make different calls (every rank raises and names the first two that differ), or a rank
            does not compare calls.
        torch.distributed.DistBackendError: a rank made no call before the deadline, or the group's store is gone.
    """
    mine, number = call(), 0
    try:
        number = _post(peers, mine)
        posted = _read(peers, lane, number, mine)
    except BaseException as error:  # otherwise the peers' next call would be compared with this one
        lane.give_up(mine.partition("(")[0], error)
        raise
    for peer in range(1, peers.world):
        if posted[peer] != posted[0]:
            raise RuntimeError(
                f"ranks of group {peers.state.name!r} make different calls (lane {lane.index}, call {number}): "
                f"rank 0 calls {posted[0]}; rank {peer} calls {posted[peer]}. "
                "All ranks must call the same op with the same shapes, in the same order."
            )


def report_rejection(op: str, peers: Peers, error: BaseException) -> None:
    """Notify the peers that this rank has rejected the arguments of a call. They raise in the call that they make."""
    if peers.settings.comparing and not peers.announced and peers.world > 1 and not peers.state.fake:
        with suppress(*REJECTIONS, RuntimeError):  # the group's store is gone
            _post(peers, f"{op} with arguments that it rejects ({type(error).__name__}: {error})")


def _topic(peers: Peers) -> str:
    return f"symm_overlap/{peers.state.name}/check/{peers.settings.lane_index}"


def _post(peers: Peers, mine: str) -> int:
    """Post a description of this rank's next call on a lane, for the peers. Return the number of the call."""
    peers.announced = True
    store, topic = group_store(peers.group), _topic(peers)
    try:
        # The store counts the calls: if a group is created again under an old name, it must not read what the old group
        # posted.
        number = store.add(f"{topic}/count/{peers.rank}", 1)
        store.set(f"{topic}/{number}/{peers.rank}", mine)
    except RuntimeError as error:
        raise StoreGoneError(peers.state.name, error) from None
    return number


def _read(peers: Peers, lane: Lane, number: int, mine: str) -> list[str]:
    """Return what every rank has posted about its call of this number, by rank."""
    store, topic, seconds = group_store(peers.group), _topic(peers), peers.settings.seconds
    keys = {peer: f"{topic}/{number}/{peer}" for peer in range(peers.world) if peer != peers.rank}
    deadline = time.monotonic() + seconds
    for peer, key in keys.items():
        pause, why_gone, peer_compares = 1e-4, "", True
        try:
            while not store.check([key]):
                if not (peer_compares := compares(peers.state, store, peer)):
                    break
                if why_gone or time.monotonic() > deadline:
                    raise dist.DistBackendError(
                        f"rank {peers.rank} of group {peers.state.name!r} calls {mine}; "
                        f"rank {peer} {why_gone or f'made no call within {seconds} s'}"
                    )
                # Check the store once more if the peer is gone: it may have posted before it ended.
                why_gone = lane.why_gone(peer)
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
        except dist.DistBackendError:
            raise
        except RuntimeError as error:
            raise StoreGoneError(peers.state.name, error) from None
        if not peer_compares:
            direct_access(peers.state, lane.device, comparing=True)  # every rank learns it there, and raises
            raise RuntimeError(f"rank {peer} of group {peers.state.name!r} does not compare calls, and this one does")
    try:  # all keys in one exchange, since each exchange with the store is slow
        texts = [text.decode() for text in store.multi_get(list(keys.values()))]
    except RuntimeError as error:
        raise StoreGoneError(peers.state.name, error) from None
    if number > 2:  # every rank has read what was posted two calls ago
        with suppress(RuntimeError):
            store.delete_key(f"{topic}/{number - 2}/{peers.rank}")
    return [*texts[: peers.rank], mine, *texts[peers.rank :]]
