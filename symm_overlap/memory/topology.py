"""Which ranks of a group can reach each other's memory: asked once a group, answered alike on every rank."""

from __future__ import annotations

import os
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .._torch import group_store

_direct: WeakKeyDictionary[dist.ProcessGroup, dict[str, bool]] = WeakKeyDictionary()


def direct_access(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether every rank of ``group`` can map the ``device`` memory of every other.

    On CPU: one host, one pid namespace, one user. On CUDA: one host, and peer access between every two devices. The
        first call for a group and kind of device is collective; every rank decides from the same facts, so all decide
        alike.
    """
    answers = _direct.setdefault(group, {})
    if device.type not in answers:
        facts = _exchange(group, f"topology/{device.type}", _facts(device))
        answers[device.type] = len(set(facts)) == 1
    return answers[device.type]


def _exchange(group: dist.ProcessGroup, topic: str, mine: str) -> list[str]:
    """What every rank of the group says about ``topic``, by rank."""
    store, name = group_store(group), group.group_name
    keys = [f"symm_overlap/{name}/{topic}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], mine)
    return [store.get(key).decode() for key in keys]


def _facts(device: torch.device) -> str:
    """What must be the same on two ranks for them to reach each other's memory."""
    host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    facts = [host, f"pid namespace {os.stat('/proc/self/ns/pid').st_ino}", f"user {os.geteuid()}"]
    if device.type == "cuda":
        here = torch.cuda.current_device()
        peers = [peer for peer in range(torch.cuda.device_count()) if peer != here]
        facts.append(f"peer access {all(torch.cuda.can_device_access_peer(here, peer) for peer in peers)}")
        if not all(torch.cuda.can_device_access_peer(here, peer) for peer in peers):
            facts.append(f"device {here} of pid {os.getpid()}")  # equal to no other rank's
    return "; ".join(facts)
