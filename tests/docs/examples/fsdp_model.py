"""FSDP2 through symmetric memory, with planned prefetching: ``torchrun --nproc-per-node 2 fsdp_model.py``."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import symm_overlap.fsdp

dist.init_process_group("gloo")  # on GPUs: "nccl", and the model and x on "cuda"
torch.manual_seed(0)  # the same weights on every rank
model = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

symm_overlap.fsdp.apply(model)
plan = symm_overlap.fsdp.plan_prefetch(model, "auto", verbose=False)  # watches a step, then plans those that follow
symm_overlap.fsdp.post_optimizer_event(optimizer, model)
x = torch.randn(8, 16, 64)  # this rank's part of the batch
for _ in range(4):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(plan)  # what each layer gathers ahead, and the predicted gain
dist.destroy_process_group()
