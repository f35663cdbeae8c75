"""One rank of the demo: what the environment says about it, and how it joins the other ranks."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, as torch does, it would keep the group, as a default argument

from symm_overlap.demo.config import Surroundings

SHARE_GPUS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's own switch for several ranks on one GPU


@dataclass(frozen=True)
class Rank:
    """This process among the others."""

    rank: int
    world: int
    device: torch.device
    group: dist.ProcessGroup


def surroundings() -> Surroundings:
    """What this process sees of the host's GPUs and of a launcher that started it."""
    started = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None
    started_here = int(os.environ.get("LOCAL_WORLD_SIZE", started)) if started is not None else None
    return Surroundings(torch.cuda.device_count(), os.environ.get(SHARE_GPUS) == "1", started, started_here)


def is_first() -> bool:
    """Whether this process prints for all of them: it is rank 0, or the ranks have not been started yet."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def join(device: str) -> Iterator[Rank]:
    """Join the process group that the environment describes, for the length of the body.

    ``device`` is ``"cpu"`` or ``"cuda"``. On CPU each rank computes on its share of the host's cores, unless
    ``OMP_NUM_THREADS`` says otherwise.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    place = torch.device("cpu")
    backend = "gloo"
    if device == "cuda":
        place = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
        # NCCL refuses two ranks on one GPU.
        backend = "cpu:gloo,cuda:nccl" if local_world <= torch.cuda.device_count() else "gloo"
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world))
    dist.init_process_group(backend)
    try:
        group = dist.group.WORLD
        assert group is not None  # init_process_group has just made it
        yield Rank(dist.get_rank(), dist.get_world_size(), place, group)
    finally:
        # No reference to the group may be left. A thread of gloo that releases a tensor while the interpreter ends
        # would abort the process.
        dist.destroy_process_group()
        gc.collect()
