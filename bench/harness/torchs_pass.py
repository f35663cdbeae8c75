"""torch's own pass that fuses collectives and matmuls in compiled graphs (``_micro_pipeline_tp``), on CPU.

The pass is written for GPUs. It silently does nothing on a build of torch without NCCL, and for a group for which
symmetric memory has not been enabled. Inside `unlocked`, both checks succeed. Nothing else about the pass is changed.
The ops that the pass writes into a graph have no CPU kernels. `symm_overlap.install_as_symm_mem` provides this
package's kernels for them, so that the results of torch's pass and of ours differ only in the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import symm_overlap

OPTIONS: dict[str, Any] = {"_micro_pipeline_tp": True}
"""Options for `torch.compile` that enable torch's pass."""

_LOGGER = "torch._inductor.fx_passes.micro_pipeline_tp"


@contextmanager
def unlocked() -> Iterator[None]:
    """Inside, torch's pass works on CPU graphs.

    Backward graphs are compiled by the first ``backward()``, so call it inside, too.
    """
    symm_overlap.install_as_symm_mem()
    logger = logging.getLogger(_LOGGER)
    level = logger.level
    logger.setLevel(logging.ERROR)  # the pass warns of every graph in which it finds nothing
    try:
        with (
            mock.patch("torch.distributed.is_nccl_available", return_value=True),
            mock.patch("torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group", return_value=True),
        ):
            yield
    finally:
        logger.setLevel(level)
