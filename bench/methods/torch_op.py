"""torch's own collective matmul, if it has a kernel for the device, and the variants that torch uses for few rows.

The conditions of the variants are those of ``_should_use_fused_all_gather_matmul_native`` and
``_should_use_multimem_all_gather_matmul`` in torch/distributed/_symmetric_memory/__init__.py of torch 2.11 and 2.13.
"""

from __future__ import annotations

import os
from unittest import mock

import torch
from torch import Tensor

from bench.harness import NotAvailableError
from bench.harness.case import Case
from bench.harness.launch import Rank
from bench.methods.method import Method, Prepared, pair, single
from symm_overlap._torch import SymmetricMemory

_NATIVE = {"TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP": "1"}


def _prepare(rank: Rank, case: Case, a: Tensor, b: Tensor) -> Prepared:
    _require_kernel(rank)
    name = rank.group_name
    if case.gathers:
        gather = torch.ops.symm_mem.fused_all_gather_matmul

        def call() -> tuple[Tensor, Tensor]:
            gathered, (output,) = gather(a, [b], 0, name)
            return output, gathered

        return Prepared(call, pair)
    scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter
    return Prepared(lambda: scatter(a, b, "sum", 0, name), single)


def _native(rank: Rank, case: Case, a: Tensor, b: Tensor) -> Prepared:
    """torch's native variant: one matmul that waits for the rows as copies deliver them."""
    _require_kernel(rank)
    if not (2048 < case.m <= 4096 and case.rows % case.world == 0):
        raise NotAvailableError("torch uses it only for more than 2048 and up to 4096 gathered rows")
    prepared = _prepare(rank, case, a, b)
    prepared.around = lambda: mock.patch.dict(os.environ, _NATIVE)
    return prepared


def _multimem(rank: Rank, case: Case, a: Tensor, b: Tensor) -> Prepared:
    """torch's multimem variant: a gather by multicast, then one matmul. It does not return the gathered tensor."""
    _require_kernel(rank)
    if case.m > 2048:
        raise NotAvailableError("torch uses it only for up to 2048 gathered rows")
    if not SymmetricMemory.has_multicast_support(torch._C._autograd.DeviceType.CUDA, rank.device.index):
        raise NotAvailableError("these GPUs have no multicast")
    gather = torch.ops.symm_mem.fused_all_gather_matmul
    return Prepared(lambda: gather(a, [b], 0, rank.group_name, return_A=False)[1][0], single)


def _require_kernel(rank: Rank) -> None:
    if rank.device.type != "cuda":
        raise NotAvailableError(f"torch.ops.symm_mem has no kernel for {rank.device.type}")


METHODS = (
    Method("torch", "torch's op", _prepare, ops=("all_gather_matmul", "matmul_reduce_scatter")),
    Method("torch_native", "torch's op, native", _native, ops=("all_gather_matmul",)),
    Method("torch_multimem", "torch's op, multimem", _multimem, ops=("all_gather_matmul",)),
)
