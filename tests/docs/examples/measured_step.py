"""Simulate a step with measured costs: ``torchrun --nproc-per-node 2 measured_step.py``."""

import torch
import torch.distributed as dist
from torch import nn

from symm_overlap.pipeline import simulate_cost
from symm_overlap.pipeline.measured import TimedAction, measured_costs, span
from symm_overlap.pipeline.runtime import PipelineRuntime, Record, Stage

dist.init_process_group("gloo")
stage = Stage(nn.Sequential(nn.Linear(256, 256), nn.Tanh()), dist.get_rank())
runtime = PipelineRuntime(stage, "1F1B", microbatches=4, loss=nn.functional.mse_loss)
x, target = torch.randn(64, 256), torch.randn(64, 256)
runtime.step(x, target=target)  # the first step sets up the runtime

record = runtime.record = Record()
steps = []
for _ in range(10):
    runtime.step(x, target=target)
    noted: list[list[TimedAction]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(noted, record.clear())
    steps.append(noted)
runtime.record = None

costs = measured_costs(runtime.schedule, steps)
if dist.get_rank() == 0:
    print(f"forwards take {costs.forward[0]:.2e} and {costs.forward[1]:.2e} s")
    predicted = simulate_cost(runtime.schedule, costs).makespan
    print(f"a step takes {predicted:.2e} s; the last one took {span(steps[-1]):.2e} s")
dist.destroy_process_group()
