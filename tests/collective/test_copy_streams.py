"""How many copy streams a call has."""

from __future__ import annotations

import pytest
import torch

from symm_overlap.collective.choosing import plans
from symm_overlap.collective.choosing.chooser import choose
from symm_overlap.collective.problem import problem
from symm_overlap.runtime import Device
from symm_overlap.settings import Settings


@pytest.mark.parametrize(
    ("op", "n", "k", "streams"),
    [
        ("all_gather_matmul", 768, 4096, 2),  # 0.07 ms of matmuls, 0.16 ms of copies
        ("all_gather_matmul", 7168, 8192, 1),  # 1.2 ms, 0.32 ms
        ("matmul_reduce_scatter", 8192, 3584, 2),
        ("matmul_all_reduce", 8192, 3584, 2),
    ],
)
@pytest.mark.parametrize("path", ["pipelined", "fused"])
def test_gathers_have_a_second_copy_stream_if_their_copies_take_longer(
    op: str, n: int, k: int, streams: int, path: str
) -> None:
    described = problem(op, 8192, n, k, torch.bfloat16, 8, "cuda")
    found = choose(described, Settings(path=path), direct=True, device=Device("NVIDIA H200"))
    assert (found.copy, found.copies) == ("copy", streams)
    names = {step.stream for step in plans.planned(described, found).steps}
    assert ("copy1" in names) == (streams == 2)
