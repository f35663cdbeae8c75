"""Memory of large outputs is reused and bounded, the system can reclaim it, and otherwise it is like any tensor's."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from symm_overlap import _C
from symm_overlap.runtime import backend_of

new_output = backend_of("cpu").new_output
LARGE = _C.large_output_bytes

MIB = 1 << 20
MOST_KEPT = 256 * MIB


def of(nbytes: int) -> torch.Tensor:
    return new_output(torch.empty(0, dtype=torch.uint8), nbytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8], ids=str)
def test_a_large_output_is_a_tensor_like_any_other(dtype: torch.dtype) -> None:
    like = torch.empty(1, dtype=dtype)
    output = new_output(like, 3, LARGE // 4, 2)
    assert (output.shape, output.dtype, output.device) == ((3, LARGE // 4, 2), dtype, like.device)
    assert output.is_contiguous()
    assert not output.requires_grad
    output.fill_(1)
    assert output.sum(dtype=torch.float64) == output.numel()
    before = output.untyped_storage().nbytes()
    assert before == output.nbytes
    output.untyped_storage().resize_(2 * before)
    output.untyped_storage().resize_(0)


def test_the_memory_of_a_freed_one_goes_to_the_next_of_its_size() -> None:
    first = of(20 * MIB)
    first.fill_(3)
    at, kept = first.data_ptr(), _C.kept_output_bytes()
    part = first[5:]
    del first
    assert _C.kept_output_bytes() == kept, "a view still uses the memory"
    del part
    assert _C.kept_output_bytes() == kept + 20 * MIB
    assert of(22 * MIB).data_ptr() != at
    again, another = of(20 * MIB), of(20 * MIB)
    assert again.data_ptr() == at != another.data_ptr()
    again.fill_(1), another.fill_(2)
    assert again.sum() == 20 * MIB
    assert another.sum() == 40 * MIB


def test_small_outputs_are_left_to_torch() -> None:
    kept = _C.kept_output_bytes()
    of(LARGE - 1)
    assert _C.kept_output_bytes() == kept


def test_no_more_is_kept_than_the_limit() -> None:
    for outputs in ([of(100 * MIB) for _ in range(5)], [of(MOST_KEPT + 2 * MIB)]):
        assert outputs
        outputs.clear()
        assert _C.kept_output_bytes() <= MOST_KEPT
    assert _C.kept_output_bytes() >= 200 * MIB


def test_what_is_kept_can_be_given_back() -> None:
    of(20 * MIB).fill_(1)
    assert _C.kept_output_bytes() >= 20 * MIB
    _C.release_kept_outputs()
    assert _C.kept_output_bytes() == 0


def test_what_is_kept_the_system_may_take_back() -> None:
    """Memory of freed outputs is marked so that the operating system may reclaim it."""

    def reclaimable() -> int:
        rollup = Path("/proc/self/smaps_rollup").read_text()
        return 1024 * sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("LazyFree:"))

    of(64 * MIB).fill_(1)
    assert reclaimable() >= 63 * MIB  # pages that a core has not accounted for yet are missing from the count


def test_an_output_that_there_is_no_memory_for_is_refused_with_its_size() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=f"cannot allocate {1 << 47} bytes for the output of an op"):
        of(1 << 47)  # larger than the address space
    assert _C.kept_output_bytes() == 0, "the kept memory is released before an allocation fails"


def test_threads_may_make_and_free_outputs_at_once() -> None:
    wrong = []

    def churn(number: int) -> None:
        for _ in range(20):
            mine = of(8 * MIB)
            mine.fill_(number)
            if mine[:: MIB // 2].ne(number).any():
                wrong.append(number)

    threads = [threading.Thread(target=churn, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_in_inference_mode_outputs_are_inference_tensors() -> None:
    with torch.inference_mode():
        assert of(LARGE).is_inference()
    assert not of(LARGE).is_inference()


def test_small_outputs_are_filled_where_torch_fills_new_tensors() -> None:
    """Small outputs are NaN in deterministic mode, and inference tensors in inference mode, as in torch."""
    torch.use_deterministic_algorithms(True)
    try:
        assert _C.new_output(torch.ones(1), (4, 4)).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.inference_mode():
        assert _C.new_output(torch.ones(1), (4, 4)).is_inference()
    assert not _C.new_output(torch.ones(1), (4, 4)).is_inference()
    half = _C.new_output(torch.ones(1, dtype=torch.bfloat16), (2, 0, 3))
    assert (half.shape, half.dtype, half.stride()) == ((2, 0, 3), torch.bfloat16, (3, 3, 1))
