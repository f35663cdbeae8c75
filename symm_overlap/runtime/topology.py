"""Which ranks of a group can reach each other's memory: asked once a group, answered alike on every rank."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .. import _C
from .._torch import group_store, resolve_group
from .backends import backend_of
from .costs import Device
from .group import GroupState

_NOT_COMPARING = "symm_overlap/{}/rank {} does not compare calls"


def direct_access(state: GroupState, device: torch.device, comparing: bool) -> bool:
    """Whether every rank of a group can map the ``device`` memory of every other.

    On CPU: one host, one pid namespace, one user. On CUDA: one host too, and every rank sees and has peer access to
    every other's GPU, which no two share unless TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 lets torch do so. The first
    call for a group and kind of device is collective; every rank decides from the same facts, so all decide alike.

    Args:
        comparing: whether this rank compares calls (SYMM_OVERLAP_CHECK). All ranks must, or none.

    Raises:
        torch.distributed.DistBackendError: a rank has died, or did not make the same call before the deadline.
        RuntimeError: shared memory cannot be used on a rank, or ranks differ in ``comparing``; every rank raises.
    """
    known = state.direct.get(device.type)
    if known is None:
        with state.asking[device.type]:
            known = state.direct.get(device.type)
            if known is None:
                known = state.direct[device.type] = state.fake or _ask(state, device, comparing)
    return known


def compares(state: GroupState, store: Any, peer: int) -> bool:
    """Whether nothing in the group's store says that ``peer``, in the group's first call, does not compare calls."""
    return not store.check([_NOT_COMPARING.format(state.name, peer)])


def _ask(state: GroupState, device: torch.device, comparing: bool) -> bool:
    if comparing:
        return _exchange(state, device, comparing)
    # A rank that compares calls would wait for the call that this one does not post. It sees this, and comes here too.
    store, key = group_store(resolve_group(state.name)), _NOT_COMPARING.format(state.name, state.rank)
    store.set(key, "")
    try:
        return _exchange(state, device, comparing)
    finally:
        with suppress(RuntimeError):  # the store is gone
            store.delete_key(key)


def _exchange(state: GroupState, device: torch.device, comparing: bool) -> bool:
    try:
        facts = _facts(device)
    except (RuntimeError, OSError) as error:
        facts = {"unusable": str(error)}
    facts["comparing"] = comparing
    answers = [json.loads(answer) for answer in _C.exchange(state.name, f"{device.type} topology", json.dumps(facts))]
    direct = in_reach(answers)
    state.devices[device.type] = tuple(Device(*answer["device"]) for answer in answers)
    return direct


def in_reach(facts: Sequence[dict[str, Any]]) -> bool:
    """Whether ranks with these facts can all reach each other's memory.

    Raises:
        RuntimeError: see `direct_access`.
    """
    for rank, fact in enumerate(facts):
        if fact.get("comparing", False) != facts[0].get("comparing", False):
            on, off = (0, rank) if facts[0].get("comparing") else (rank, 0)
            raise RuntimeError(
                f"rank {on} compares calls (SYMM_OVERLAP_CHECK=1) and rank {off} does not: set it alike on every rank"
            )
        if "unusable" in fact:
            raise RuntimeError(f"symm_overlap: rank {rank}: {fact['unusable']}")
    if not all(fact["shares"] for fact in facts) and len({fact["memory"] for fact in facts}) < len(facts):
        return False
    return all(
        fact["host"] == facts[0]["host"] and fact["memory"] in peer["reaches"] for fact in facts for peer in facts
    )


def _facts(device: torch.device) -> dict[str, Any]:
    """What a rank tells the others: where it is, which memory is its own, which it can reach, whether it may share."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = f"{boot}, pid namespace {os.stat('/proc/self/ns/pid').st_ino}, user {os.geteuid()}"
    backend = backend_of(device.type)
    return {"host": host, "device": backend.described(device), **backend.facts(device)}
