"""What is exposed in a step of two ops: ``torchrun --nproc-per-node 2 exposed_step.py``."""

import torch
import torch.distributed as dist

import symm_overlap

dist.init_process_group("gloo")
torch.set_num_threads(1)
group = dist.group.WORLD
x, up, down = torch.randn(512, 1024), torch.randn(1024, 512), torch.randn(512, 1024)


def step() -> None:
    _, (hidden,) = symm_overlap.all_gather_matmul(x, [up], 0, group, return_A=False)
    symm_overlap.matmul_reduce_scatter(hidden, down, "sum", 0, group)


with symm_overlap.force_path("pipelined", chunks=2):
    step()  # the first step sets up memory
    with symm_overlap.profile.record() as recorded:
        for _ in range(3):
            step()
if dist.get_rank() == 0:
    print(recorded)
dist.destroy_process_group()
