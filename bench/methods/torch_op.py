"""torch's own collective matmul, where it has a kernel for the device."""

from __future__ import annotations

import torch

from bench.harness import NotAvailableError
from bench.harness.case import Case
from bench.harness.launch import Rank
from bench.methods.method import Method, Prepared, pair, single


def _prepare(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor) -> Prepared:
    if rank.device.type != "cuda":
        raise NotAvailableError(f"torch.ops.symm_mem has no kernel for {rank.device.type}")
    name = rank.group_name
    if case.gathers:
        gather = torch.ops.symm_mem.fused_all_gather_matmul

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            gathered, (output,) = gather(a, [b], 0, name)
            return output, gathered

        return Prepared(call, pair)
    scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter
    return Prepared(lambda: scatter(a, b, "sum", 0, name), single)


METHODS = (Method("torch", "torch's op", _prepare, ops=("all_gather_matmul", "matmul_reduce_scatter")),)
