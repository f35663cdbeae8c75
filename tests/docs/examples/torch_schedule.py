"""Run one of our schedules by torch.distributed.pipelining: ``torchrun --nproc-per-node 2 torch_schedule.py``."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from symm_overlap.pipeline import torch_schedule
from symm_overlap.pipeline.generators import generate

dist.init_process_group("gloo")
schedule = generate("ZBV", ranks=2, microbatches=4)
mine = schedule.stages_of_ranks[dist.get_rank()]  # stages 0 and 3 on rank 0, 1 and 2 on rank 1

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))  # the same on every rank
stages = [PipelineStage(model[index], index, schedule.stages, torch.device("cpu")) for index in mine]
runtime = torch_schedule(schedule, stages, nn.functional.mse_loss)

x, target = torch.randn(16, 8), torch.randn(16, 8)
if dist.get_rank() == 0:  # rank 0 has the first stage and, in a V-shaped schedule, also the last one
    losses: list[torch.Tensor] = []
    runtime.step(x, target=target, losses=losses)
    print(f"loss {torch.stack(losses).mean():.4f}")
else:
    runtime.step()
dist.destroy_process_group()
