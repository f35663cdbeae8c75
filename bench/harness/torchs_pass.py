"""torch's own pass that fuses collectives and matmuls in compiled graphs (``_micro_pipeline_tp``), on CPU.

The pass is written for GPUs. It returns without a word on a build of torch without NCCL, and for a group that symmetric
memory has not been enabled for. `unlocked` answers both questions with yes for as long as it lasts, and changes nothing
else. The ops that the pass writes into a graph have no CPU kernels; `symm_overlap.install_as_symm_mem` gives them those
of this package, so that whatever two passes differ in is the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import symm_overlap

OPTIONS: dict[str, Any] = {"_micro_pipeline_tp": True}
"""Options for `torch.compile`, which turn it on."""

_LOGGER = "torch._inductor.fx_passes.micro_pipeline_tp"


@contextmanager
def unlocked() -> Iterator[None]:
    """Inside, torch's pass works on CPU graphs. Backward graphs are compiled by the first ``backward()``."""
    symm_overlap.install_as_symm_mem()
    logger = logging.getLogger(_LOGGER)
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of every graph in which it finds nothing
    try:
        with (
            mock.patch("torch.distributed.is_nccl_available", return_value=True),
            mock.patch("torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group", return_value=True),
        ):
            yield
    finally:
        logger.setLevel(level)
