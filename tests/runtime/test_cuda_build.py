"""What a build with CUDA must contain and reject, even on a machine without a GPU."""

import pytest
import torch

from symm_overlap import _C
from symm_overlap.runtime import TRAITS

pytestmark = pytest.mark.skipif(not _C.with_cuda, reason="the extension was built without CUDA")


def test_the_reduce_is_registered_for_cuda_and_for_tensors_without_data() -> None:
    op = torch.ops.symm_overlap.reduce_partials
    for key in ("CUDA", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key("symm_overlap::reduce_partials", key)
    a = torch.empty(4, device="meta")
    assert op([a, a], True, a, a) is None
    assert "Tensor(a!) out, Tensor(b!)? copy=None" in str(op.default._schema)


def test_as_many_ranks_can_sum_as_the_kernel_takes_partials() -> None:
    """The limit of ranks in a sum equals the number of partial results that the kernel accepts."""
    assert _C.max_partials == TRAITS["cuda"].most_ranks_in_a_sum


def test_a_lane_refuses_memory_that_is_not_its_control_block() -> None:
    words = _C.CudaLane.control_words(2, 4)
    control, peers = torch.zeros(words, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=rf"world 2 and 4 channels is a CUDA tensor of {words} int32; got .* of {words}"
    ):
        _C.CudaLane(control, peers, 0, 2, 4)
    with pytest.raises(ValueError, match=r"0 <= rank < world .* got rank 2, world 2"):
        _C.CudaLane(control, peers, 2, 2, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_cuda_itself_fails_there_are_no_memory_operations() -> None:
    assert _C.has_memory_operations(0) is False
    assert "CUDA" in _C.pinning_refused(0)
