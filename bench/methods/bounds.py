"""The bounds: the matmul without communication, and the copies without matmul and synchronisation.

If the ops multiply with another library than torch, there are two rows for the matmul.
"""

from __future__ import annotations

import torch

from bench.harness.case import Case
from bench.harness.launch import Rank
from bench.harness.symmetric import Symmetric, symmetric_empty
from bench.methods.method import Method, Multiply, Prepared, multiply_of_ours, torch_mm


def _matmul(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor, multiply: Multiply = torch_mm) -> Prepared:
    """The whole matmul of one rank, not split. For an all-gather-matmul, the input has already been gathered."""
    output = a.new_empty(case.m, case.n)
    if not case.gathers:
        return Prepared(lambda: multiply(a, b, output), None)
    gathered = a.new_empty(case.m, case.k)

    def load(kind: str) -> None:
        gathered.copy_(a.repeat(case.world, 1))

    return Prepared(lambda: multiply(gathered, b, output), None, load=load)


def _matmul_of_ours(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor) -> Prepared:
    return _matmul(rank, case, a, b, multiply_of_ours(rank, case))


def _copies(rank: Rank, case: Case, a: torch.Tensor, b: torch.Tensor) -> Prepared:
    """Each rank copies the data it needs from its peers' memory: shards to gather, or partial results to sum.

    Rank r starts with peer r+1. A matmul-all-reduce also copies the reduced rows of every peer.
    """
    order = [(rank.rank + step) % case.world for step in range(1, case.world)]
    shape = (case.rows, case.k) if case.gathers else (case.world, case.rows, case.n)
    symmetric = symmetric_empty(rank, *shape, dtype=case.dtype)
    symmetric.tensor.zero_()
    if case.gathers:
        sources = [symmetric.peers[peer] for peer in order]
    else:
        sources = [symmetric.peers[peer][rank.rank] for peer in order]
        if case.op == "matmul_all_reduce":
            sources += [symmetric.peers[peer][peer] for peer in order]
    moves = [(torch.empty_like(source), source) for source in sources]

    def call() -> Symmetric:
        for target, source in moves:
            target.copy_(source)
        return symmetric  # the reference here keeps the memory alive as long as this function

    return Prepared(call, None)


METHODS = (
    Method("matmul", "matmul alone", _matmul),
    Method("matmul_of_ours", "matmul alone, as ours calls it", _matmul_of_ours),
    Method("copies", "copies alone", _copies),
)
