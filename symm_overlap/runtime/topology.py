"""Whether the ranks of a group can reach each other's memory: found out once for each group, alike on all ranks."""

from __future__ import annotations

import json
import os
import uuid
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
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
    """Return whether every rank of a group can map the ``device`` memory of every other rank.

    On CPU, this requires one host, one pid namespace and one user, and the ranks try whether they can open each other's
    files. On CUDA, it also requires one host, and every rank must see, and have peer access to, the GPU of every other
    rank. No two ranks may share a GPU unless TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 makes torch allow it. The first
    call for a group and kind of device is collective. All ranks decide from the same facts, so all get the same answer.

    Args:
        comparing: whether this rank compares calls (SYMM_OVERLAP_CHECK). Either all ranks must compare, or none.

    Raises:
        torch.distributed.DistBackendError: a rank has died, or did not make the same call before the deadline.
        RuntimeError: shared memory cannot be used on some rank, or ranks differ in ``comparing``. Every rank raises.
    """
    known = state.direct.get(device.type)
    if known is None:
        with state.exchange_locks[device.type]:
            known = state.direct.get(device.type)
            if known is None:
                known = state.direct[device.type] = state.fake or _ask(state, device, comparing)
    return known


def compares(state: GroupState, store: Any, peer: int) -> bool:
    """Return False if the group's store says that ``peer`` is in the group's first call and does not compare calls."""
    return not store.check([_NOT_COMPARING.format(state.name, peer)])


def _ask(state: GroupState, device: torch.device, comparing: bool) -> bool:
    if comparing:
        return _exchange(state, device, comparing)
    # A rank that compares calls would wait for the call that this rank does not post. It finds this key instead, and
    # then comes to the exchange too.
    store, key = group_store(resolve_group(state.name)), _NOT_COMPARING.format(state.name, state.rank)
    store.set(key, "")
    try:
        return _exchange(state, device, comparing)
    finally:
        with suppress(RuntimeError):  # the store no longer exists
            store.delete_key(key)


def _exchange(state: GroupState, device: torch.device, comparing: bool) -> bool:
    with ExitStack() as offering:
        try:
            facts = _facts(device)
            facts["offer"] = offering.enter_context(backend_of(device.type).offer())
        except (RuntimeError, OSError) as error:
            facts = {"unusable": str(error)}
        facts["comparing"] = comparing
        answers = _said(state, f"{device.type} topology", facts)
        direct = in_reach(answers)
        if direct and answers[0]["offer"] is not None and len(answers) > 1:
            direct = _tried(state, device, [answer["offer"] for answer in answers])
    state.devices[device.type] = tuple(Device(*answer["device"]) for answer in answers)
    return direct


def _said(state: GroupState, purpose: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(answer) for answer in _C.exchange(state.name, purpose, json.dumps(mine))]


def _tried(state: GroupState, device: torch.device, offers: Sequence[Any]) -> bool:
    """Return whether all ranks can take what their peers offer. What the kernel allows depends on more than facts tell:
    on user namespaces, groups and capabilities, for example.
    """
    try:
        failures = {rank: why for rank, offer in enumerate(offers) if (why := backend_of(device.type).take(offer))}
        mine: dict[str, Any] = {"failed": bool(failures)}
    except (RuntimeError, OSError) as error:
        failures, mine = {}, {"unusable": str(error)}
    answers = _said(state, f"{device.type} reach", mine)
    for rank, answer in enumerate(answers):
        if "unusable" in answer:
            raise RuntimeError(f"symm_overlap: rank {rank}: {answer['unusable']}")
    if failures:
        rank, why = next(iter(failures.items()))
        warnings.warn(
            f"symm_overlap: rank {state.rank} of group {state.name!r} cannot open memory of rank {rank}: {why}. So the "
            "ranks use the path c10d. To share memory, they must have the same user, group, capabilities and user "
            "namespace",
            RuntimeWarning,
            stacklevel=2,
        )
    return not any(answer["failed"] for answer in answers)


def in_reach(facts: Sequence[dict[str, Any]]) -> bool:
    """Return whether ranks with these facts can all reach each other's memory.

    Raises:
        RuntimeError: see `direct_access`.
    """
    for rank, fact in enumerate(facts):
        if fact["comparing"] != facts[0]["comparing"]:
            on, off = (0, rank) if facts[0]["comparing"] else (rank, 0)
            raise RuntimeError(
                f"rank {on} compares calls (SYMM_OVERLAP_CHECK=1) and rank {off} does not: set it to the same "
                "value on every rank"
            )
        if "unusable" in fact:
            raise RuntimeError(f"symm_overlap: rank {rank}: {fact['unusable']}")
    if not all(fact["shares"] for fact in facts) and len({fact["memory"] for fact in facts}) < len(facts):
        return False
    return all(
        fact["host"] == facts[0]["host"] and fact["memory"] in peer["reaches"] for fact in facts for peer in facts
    )


def _facts(device: torch.device) -> dict[str, Any]:
    """Return the facts about this rank: its host, the memory that it owns, the memory that it can reach, and whether
    ranks may share memory.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = f"{boot}, pid namespace {os.stat('/proc/self/ns/pid').st_ino}, user {os.geteuid()}"
    except (FileNotFoundError, PermissionError):  # a container may hide them
        host = f"unknown {uuid.uuid4()}"
    backend = backend_of(device.type)
    return {"host": host, "device": backend.described(device), **backend.facts(device)}
