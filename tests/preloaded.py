"""What the fork server of tests/ranks.py imports once, so that no rank has to: torch, its compiler, and this package.

A rank that imports the compiler by itself spends two seconds on it. Nothing of the package is called here: what it
reads from the environment it reads in the rank, which has the environment of its pool.
"""

import gc
import os
from pathlib import Path

from tests.rank_process import COMPILER

os.environ.update(COMPILER)  # before the compiler is imported, which reads some of it then

import numpy  # noqa: F401
import pytest  # noqa: F401
import torch.distributed._symmetric_memory
import torch.distributed.tensor.parallel
import torch.fx.experimental.symbolic_shapes

# The compiler might ask for GPUs, and CUDA does not survive a fork after that; nor does the one of tests/host_gpu.
if torch.version.cuda is None or not (list(Path("/dev").glob("nvidia*")) or "SYMM_OVERLAP_HOST_GPU" in os.environ):
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.experimental
    import torch.utils.cpp_extension
    from transformers import GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

    import symm_overlap.demo.pipeline_trainer
    import symm_overlap.fsdp
    import symm_overlap.inductor
    import symm_overlap.pipeline.model  # noqa: F401

    # What the compiler makes at its first graph, its patterns above all, takes a process seconds. Without a gradient:
    # autograd, where it has threads for GPUs, does not survive a fork.
    with torch.no_grad():
        torch.compile(lambda x: (x @ x).relu())(torch.ones(2, 2))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

gc.collect()
gc.freeze()  # or the garbage collector of every rank would look at all of that again and again, and copy its pages
