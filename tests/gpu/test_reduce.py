"""The reduce kernel, compared bit by bit with the same additions made one after the other by torch."""

import os

import pytest
import torch
from torch.library import opcheck

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def reference(partials: list[torch.Tensor], average: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
    wide = torch.float64 if partials[0].dtype == torch.float64 else torch.float32
    total = partials[0].cpu().to(wide)
    for partial in partials[1:]:
        total = total + partial.cpu().to(wide)
    if average:  # the divisor is a tensor, because torch may multiply by the reciprocal of a number instead
        total = total / torch.full_like(total, len(partials))
    return total.to(dtype or partials[0].dtype).to(partials[0].device)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7, 8, 65, 256])
@pytest.mark.parametrize("average", [False, True])
def test_sums_are_made_in_rank_order_and_rounded_once(world: int, average: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(world)
    # On the host GPU, more would take half a minute.
    largest = 20_001 if world >= 65 and "SYMM_OVERLAP_HOST_GPU" in os.environ else 300_001
    for size in (1, 7, 8, 1000, 4097, largest):
        for offset in (0, 1):  # with 1, no pointer is aligned for vector loads
            memory = torch.randn(world, size + 16, device="cuda").to(dtype)
            partials = [row[offset : offset + size].clone() if offset == 0 else row[1 : 1 + size] for row in memory]
            out = torch.full((size + 2,), float("nan"), device="cuda", dtype=dtype)[offset : offset + size]
            copy = torch.full_like(out, float("nan"))
            torch.ops.symm_overlap.reduce_partials(partials, average, out, copy)
            expected = reference(partials, average)
            assert torch.equal(bits(out), bits(expected)), f"{size} elements, offset {offset}"
            assert torch.equal(bits(copy), bits(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8])
def test_sums_of_half_precision_can_stay_float32(world: int, dtype: torch.dtype) -> None:
    torch.manual_seed(world)
    for size in (1, 7, 8, 1000, 4097, 300_001):
        for offset, average in ((0, False), (0, True), (1, True), (4, False)):  # 4: aligned for one vector of float32
            memory = torch.randn(world, size + 16, device="cuda").to(dtype)
            partials = [row[:size].clone() for row in memory]
            out = torch.full((size + 6,), float("nan"), device="cuda")[offset : offset + size]
            after = torch.full((size + 8,), 7.0, device="cuda")
            copy = after[offset : offset + size]
            torch.ops.symm_overlap.reduce_partials(partials, average, out, copy)
            expected = reference(partials, average, torch.float32)
            assert torch.equal(bits(out), bits(expected)), f"{size} elements, offset {offset}"
            assert torch.equal(bits(copy), bits(expected))
            assert after[offset + size :].eq(7).all()
            assert after[:offset].eq(7).all()


def test_the_order_of_ranks_shows_in_the_last_bit() -> None:
    # float32 cannot represent 2**24 + 1. From the left, each 1 is lost. From the right, the ones are added first.
    values = [2.0**24, 1.0, 1.0]
    partials = [torch.full((64,), value, device="cuda") for value in values]
    out = torch.empty(64, device="cuda")
    torch.ops.symm_overlap.reduce_partials(partials, False, out)
    assert out.unique().tolist() == [2.0**24]
    torch.ops.symm_overlap.reduce_partials(partials[::-1], False, out)
    assert out.unique().tolist() == [2.0**24 + 2]


def test_bfloat16_is_accumulated_in_float32() -> None:
    # In bfloat16, 256 + 1 is 256: rounding at every step would give 256.
    partials = [torch.full((40,), value, device="cuda", dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0, 1.0)]
    out = torch.empty_like(partials[0])
    torch.ops.symm_overlap.reduce_partials(partials, False, out)
    assert out.unique().tolist() == [260.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_negative_zero_and_nan_and_infinity_survive(dtype: torch.dtype) -> None:
    values = torch.tensor([-0.0, 0.0, float("inf"), float("-inf"), float("nan")], device="cuda", dtype=dtype)
    out = torch.empty_like(values)
    torch.ops.symm_overlap.reduce_partials([values, torch.full_like(values, -0.0)], False, out)
    assert torch.equal(torch.signbit(out)[:4], torch.tensor([True, False, False, True], device="cuda"))
    assert out[:4].tolist() == [0.0, 0.0, float("inf"), float("-inf")]
    assert out[4].isnan()


def test_only_the_output_is_written() -> None:
    memory = torch.zeros(4, 1 << 16, device="cuda")
    memory[:2] = 1.0
    torch.ops.symm_overlap.reduce_partials([memory[0], memory[1]], False, memory[2])
    assert memory.sum(1).tolist() == [65536.0, 65536.0, 131072.0, 0.0]


def test_nothing_to_reduce_is_no_error() -> None:
    torch.ops.symm_overlap.reduce_partials([torch.empty(0, device="cuda")], False, torch.empty(0, device="cuda"))
    torch.cuda.synchronize()


def test_bad_arguments_are_refused_with_what_was_given() -> None:
    op = torch.ops.symm_overlap.reduce_partials
    a = torch.ones(4, 4, device="cuda")
    with pytest.raises(ValueError, match="1 to 256 partials; got 0"):
        op([], False, a)
    with pytest.raises(ValueError, match="1 to 256 partials; got 257"):
        op([a] * 257, False, a)
    with pytest.raises(ValueError, match="must be contiguous"):
        op([a.t()], False, a)
    with pytest.raises(ValueError, match="a partial must have the 16 elements of out; got 8"):
        op([a[:2]], False, a)
    with pytest.raises(ValueError, match="a partial must be Float; got Half"):
        op([a, a.half()], False, a)
    with pytest.raises(ValueError, match="out must be Float; got Half"):
        op([a], False, a.half())
    with pytest.raises(ValueError, match="out must be Half; got Double"):
        op([a.half()], False, a.double())
    with pytest.raises(ValueError, match="copy must be Float; got Half"):
        op([a.half()], False, a, a.half())
    with pytest.raises(TypeError, match="float32, float64, bfloat16 and float16"):
        op([a.long()], False, a.long())


def test_opcheck() -> None:
    a, out, copy = (torch.randn(64, device="cuda") for _ in range(3))
    opcheck(torch.ops.symm_overlap.reduce_partials.default, ([a, a], True, out, copy))
