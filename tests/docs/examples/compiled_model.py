"""Compile a model with torch's tensor parallelism: ``torchrun --nproc-per-node 2 compiled_model.py``."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import symm_overlap

dist.init_process_group("gloo")  # on GPUs: "nccl", and the model and x on "cuda"
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)  # the same weights on every rank
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
styles = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
model = parallelize_module(model, mesh, styles)  # gathers the rows before "0", and scatters them after "2"
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

compiled = torch.compile(model, options=symm_overlap.inductor.options())
x = torch.randn(128, 256)  # this rank's rows
for _ in range(3):
    loss = compiled(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(symm_overlap.inductor.report())
dist.destroy_process_group()
