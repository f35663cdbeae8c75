"""The checks must find errors that other benchmarks missed: swapped ranks, stale buffers, too much rounding."""

from __future__ import annotations

import torch

from bench.harness.case import Case, inputs, reference
from bench.harness.check import Checked, error_bound, first_difference, poisoned_empty, relative_error

CPU = torch.device("cpu")


def test_exact_check_sees_shards_in_the_wrong_order() -> None:
    case = Case("all_gather_matmul", 32, 16, 64, torch.float32, 2)
    expected = reference(case, 0, "binary", CPU)
    right = expected["output"].float()
    assert first_difference("output", right, expected["output"]) == ""
    swapped = torch.cat(list(right.chunk(2))[::-1])
    assert first_difference("output", swapped, expected["output"]).startswith("output[0, ")


def test_exact_check_sees_one_element_left_poisoned() -> None:
    expected = torch.ones(4, 4, dtype=torch.float64)
    found = torch.ones(4, 4)
    found[2, 3] = float("nan")
    assert first_difference("output", found, expected) == "output[2, 3] is nan, expected 1.0; 1 of 16 differ"


def test_exact_check_sees_a_wrong_shape() -> None:
    assert "shape (2, 3)" in first_difference("output", torch.ones(2, 3), torch.ones(3, 2).double())


def test_relative_error_of_poison_passes_no_bound() -> None:
    error = relative_error(torch.tensor([1.0, float("nan")]), torch.ones(2).double())
    assert not Checked(True, error, 1e9).ok


def test_error_bound_admits_rounding_and_not_a_lost_term() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = Case("matmul_reduce_scatter", 64, 32, 512, dtype, 4)
        expected = reference(case, 1, "normal", CPU)["output"]
        shards = [inputs(case, rank, "normal", CPU) for rank in range(4)]
        partials = [(a @ b)[16:32] for a, b in shards]
        total = torch.stack(partials).float().sum(0).to(dtype)
        assert relative_error(total, expected) <= error_bound(case)
        short = [(a[:, :-1] @ b[:-1])[16:32] for a, b in shards[:1]] + partials[1:]  # 1 of 2048 products is missing
        if dtype == torch.float32:
            assert relative_error(torch.stack(short).sum(0), expected) > error_bound(case)


def test_poisoned_empty_fills_new_memory_and_ends() -> None:
    with poisoned_empty():
        assert torch.empty(1000).isnan().all()
        assert torch.empty(10, dtype=torch.bfloat16).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
