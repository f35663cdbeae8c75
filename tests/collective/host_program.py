"""Runs some of the ranks of a group, as if on one of several hosts. test_hosts.py starts this program once per host.

``python -m tests.collective.host_program STORE_ADDRESS WORLD RANK [RANK ...]``
"""

from __future__ import annotations

import os
import random
import sys
import traceback

import torch
import torch.distributed as dist

import symm_overlap
from tests.collective.test_lanes import calls, in_threads
from tests.collective.test_values import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from tests.ranks import Rank
from tests.transforms import choices

PORT = 29400


def run_rank(address: str, world: int, rank: int) -> None:
    """Call every op without forcing a path, and compare the results with torch's references."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=world)
    assert dist.group.WORLD is not None
    me = Rank(rank, world, dist.group.WORLD, torch.device("cpu"), {tuple(range(world)): dist.group.WORLD})
    for op in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce):
        with choices() as made:
            op(me, None, torch.float32)
        for _, choice in made:
            say(f"rank {rank}: {op.__name__} by {choice.path}, because {choice.reason}")
    # On several hosts too, several ops may be in flight at the same time.
    in_threads([lambda lane=lane: calls(me.group, lane, 0, 4, "c10d") for lane in range(3)], random.Random(rank))
    with symm_overlap.force_path("pipelined"):
        try:
            symm_overlap.all_gather(torch.ones(2), 0, me.group)
        except ValueError as error:
            say(f"rank {rank}: refused: {error}")
    dist.barrier()
    dist.destroy_process_group()


def say(line: str) -> None:
    """Write a line at once. The ranks of a host share a pipe, and `print` would write the newline separately."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    address, world, *ranks = sys.argv[1:]
    children = []
    for rank in ranks:
        child = os.fork()
        if child == 0:
            try:
                run_rank(address, int(world), int(rank))
                sys.stdout.flush()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        children.append(child)
    return max(os.waitpid(child, 0)[1] for child in children) and 1


if __name__ == "__main__":
    sys.exit(main())
