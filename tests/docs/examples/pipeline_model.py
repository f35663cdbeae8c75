"""Hugging Face's GPT-2 as a pipeline on two ranks: ``torchrun --nproc-per-node 2 pipeline_model.py``."""

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from symm_overlap.pipeline.model import PipelineModel

dist.init_process_group("gloo")
torch.manual_seed(0)
config = GPT2Config(
    n_layer=6, n_embd=32, n_head=2, n_positions=16, vocab_size=64, bos_token_id=0, eos_token_id=0,
    embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, use_cache=False,
)  # fmt: skip
model = GPT2LMHeadModel(config)
ids = torch.randint(0, 64, (8, 16))

pipeline = PipelineModel(model, "GPT2Block", num_microbatches=4, schedule="ZBV").build(input_ids=ids, labels=ids)
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)  # for this rank's part of the model
del model
for _ in range(3):
    loss = pipeline.run_train(input_ids=ids, labels=ids)
    optimizer.step()
    optimizer.zero_grad()
    if loss is not None:  # this rank has the last stage
        print(f"{pipeline.sizes} layers, loss {loss:.4f}")
dist.destroy_process_group()
