"""A pipeline of four stages on two ranks: ``torchrun --nproc-per-node 2 pipeline_runtime.py``."""

import torch
import torch.distributed as dist
from torch import nn

from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.runtime import PipelineRuntime, Stage

dist.init_process_group("gloo")
schedule = generate("ZBV", ranks=2, microbatches=4)
mine = schedule.stages_of_ranks[dist.get_rank()]  # stages 0 and 3 on rank 0, 1 and 2 on rank 1

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))  # the same on every rank
stages = [Stage(model[index], index) for index in mine]
runtime = PipelineRuntime(stages, schedule, loss=nn.functional.mse_loss)
optimizer = torch.optim.AdamW([each for stage in stages for each in stage.module.parameters()])

x, target = torch.randn(16, 8), torch.randn(16, 8)
for _ in range(3):
    losses: list[torch.Tensor] = []
    runtime.step(x, target=target, losses=losses)  # each rank uses the parts of the batch that its stages need
    if losses:  # this rank has the last stage
        print(f"loss {torch.stack(losses).mean():.4f}")
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
