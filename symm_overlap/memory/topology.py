"""Which ranks of a group can reach each other's memory: asked once a group, answered alike on every rank."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
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

    On CPU: one host, one pid namespace, one user. On CUDA: one host too, and every rank sees and has peer access to
    every other's GPU, which no two share unless TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 lets torch do so. The first
    call for a group and kind of device is collective; every rank decides from the same facts, so all decide alike.

    Raises:
        torch.distributed.DistBackendError: a rank has died, or did not make the same call before the deadline.
    """
    with _answers_lock:
        answer = _answers.setdefault(group, {}).setdefault(device.type, _Answer())
    if answer.direct is None:
        with answer.lock:
            if answer.direct is None:
                facts = _C.exchange(group.group_name, f"{device.type} topology", _facts(device))
                answer.direct = in_reach([json.loads(fact) for fact in facts])
    return answer.direct


def in_reach(facts: Sequence[dict[str, Any]]) -> bool:
    """Whether ranks with these facts can all reach each other's memory."""
    if not all(fact["shares"] for fact in facts) and len({fact["memory"] for fact in facts}) < len(facts):
        return False
    return all(
        fact["host"] == facts[0]["host"] and fact["memory"] in peer["reaches"] for fact in facts for peer in facts
    )


def _facts(device: torch.device) -> str:
    """What a rank tells the others: where it is, which memory is its own, which it can reach, whether it may share."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = f"{boot}, pid namespace {os.stat('/proc/self/ns/pid').st_ino}, user {os.geteuid()}"
    if device.type != "cuda":
        usable = os.access(_C.shm_dir(), os.W_OK | os.X_OK)
        return json.dumps({"host": host, "memory": "shared", "reaches": ["shared"] if usable else [], "shares": True})
    # By the GPUs' own numbers: a process that sees only one of them calls it 0, as its peers do theirs.
    here = device.index
    gpus = {index: str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())}
    reaches = [gpu for index, gpu in gpus.items() if index == here or torch.cuda.can_device_access_peer(here, index)]
    shares = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"  # its rendezvous refuses else
    return json.dumps({"host": host, "memory": gpus[here], "reaches": reaches, "shares": shares})
