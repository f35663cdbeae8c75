"""One rank of the demo: its settings in the environment, and how it joins the other ranks."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn  # torch would import it later, and a default argument in it would then keep the group alive
from torch.distributed.device_mesh import init_device_mesh

from symm_overlap.demo.config import LaunchEnvironment

SHARE_GPUS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's own switch for several ranks on one GPU


@dataclass(frozen=True)
class Rank:
    """The place of this process among all ranks.

    Attributes:
        rank, world: the rank of this process and the world size, over all ranks.
        group: the ranks that share every layer with this rank.
        pipeline: the ranks of this rank's pipeline, one for each part, in order; None without a pipeline.
        data: the ranks that have the same part of the model and train on other windows; None if there are none.
    """

    rank: int
    world: int
    device: torch.device
    group: dist.ProcessGroup
    pipeline: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None


def launch_environment() -> LaunchEnvironment:
    """Return what this process sees of the GPUs of this host, and of the launcher if one has started it."""
    started = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None
    started_here = int(os.environ.get("LOCAL_WORLD_SIZE", started)) if started is not None else None
    return LaunchEnvironment(torch.cuda.device_count(), os.environ.get(SHARE_GPUS) == "1", started, started_here)


def is_first() -> bool:
    """True if this process prints for all ranks: it is rank 0, or the ranks have not been started yet."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def join(device: str, parts: int = 1, copies: int = 1) -> Iterator[Rank]:
    """Join the process groups that the environment describes, for the duration of the body.

    ``parts`` is the number of parts of the pipeline. ``copies`` is the number of data-parallel copies of the model.
    Each copy trains on its own windows. ``device`` is ``"cpu"`` or ``"cuda"``. On CPU, each rank uses its share of the
    host's cores, unless ``OMP_NUM_THREADS`` is set.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    place = torch.device("cpu")
    backend = "gloo"
    if device == "cuda":
        place = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
        # NCCL does not support two ranks on one GPU.
        backend = "cpu:gloo,cuda:nccl" if local_world <= torch.cuda.device_count() else "gloo"
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world))
    dist.init_process_group(backend)
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        yield Rank(rank, world, place, *groups_of(device, parts, copies))
    finally:
        # No reference to the group may remain. If a thread of gloo released a tensor while the interpreter ends, it
        # would abort the process.
        dist.destroy_process_group()
        gc.collect()


def groups_of(
    device: str, parts: int = 1, copies: int = 1
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Create the groups of this rank: group, pipeline and data of `Rank`. Collective over all ranks.

    Ranks that share layers communicate most, so they have consecutive numbers. The parts of a pipeline communicate
    least, so their numbers are furthest apart. With 8 ranks in 2 parts and 2 copies, ranks 0 and 1 share layers, ranks
    0 and 2 share the windows of a step, and ranks 0 and 4 are a pipeline.
    """
    if parts == copies == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD, None, None
    names = ("pipeline", "data", "layers")
    mesh = init_device_mesh(device, (parts, copies, dist.get_world_size() // (parts * copies)), mesh_dim_names=names)
    return (
        mesh.get_group("layers"),
        mesh.get_group("pipeline") if parts > 1 else None,
        mesh.get_group("data") if copies > 1 else None,
    )
