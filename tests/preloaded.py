"""What the fork server of tests/ranks.py imports once, so that no rank has to: torch and its compiler.

A rank that imports the compiler by itself spends two seconds on it. Nothing of ours stands here: ranks import it with
the environment of their pool.
"""

import os

from tests.rank_process import COMPILER

os.environ.update(COMPILER)  # before the import: Inductor reads some of it then

import numpy  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed._symmetric_memory
import torch.distributed.tensor.parallel
import torch.fx.experimental.symbolic_shapes  # noqa: F401
