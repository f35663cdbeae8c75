"""Which ranks of a group can reach each other's memory: asked once a group, answered alike on every rank."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .. import _C


class _Answer:
    """Asked for once, also by threads that make their first calls together: on a peer they may have come one by one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.direct: bool | None = None


_answers: WeakKeyDictionary[dist.ProcessGroup, dict[str, _Answer]] = WeakKeyDictionary()
_answers_lock = threading.Lock()


def direct_access(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether every rank of ``group`` can map the ``device`` memory of every other.

    On CPU: one host, one pid namespace, one user. On CUDA: one host, and peer access between every two devices. The
    first call for a group and kind of device is collective; every rank decides from the same facts, so all decide
    alike.

    Raises:
        torch.distributed.DistBackendError: a rank has died, or did not make the same call before the deadline.
    """
    with _answers_lock:
        answer = _answers.setdefault(group, {}).setdefault(device.type, _Answer())
    if answer.direct is None:
        with answer.lock:
            if answer.direct is None:
                facts = _C.exchange(group.group_name, f"{device.type} topology", _facts(device))
                answer.direct = len(set(facts)) == 1
    return answer.direct


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
