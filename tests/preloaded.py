"""Imports of the fork server of tests/ranks.py, so that no rank has to import torch, its compiler, or this package.

A rank would need two seconds to import the compiler by itself. Nothing of the package is called here, because the
package must read environment variables in the rank, which has the environment of its pool.
"""

import gc
import os
from pathlib import Path

from tests.rank_process import COMPILER

os.environ.update(COMPILER)  # before the import of the compiler, which reads some of these variables

import numpy  # noqa: F401
import pytest  # noqa: F401
import torch.distributed._symmetric_memory
import torch.distributed.tensor.parallel
import torch.fx.experimental.symbolic_shapes

# The compiler may query GPUs, and afterwards CUDA does not work in a forked process. The same holds for the CUDA of
# tests/host_gpu.
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

    # Compile a first graph here, because the compiler then spends seconds on creating its patterns. Without gradients,
    # because autograd does not work in a forked process if it has started threads for GPUs.
    with torch.no_grad():
        torch.compile(lambda x: (x @ x).relu())(torch.ones(2, 2))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

gc.collect()
gc.freeze()  # otherwise the garbage collector of every rank scans all these objects repeatedly and copies their pages
