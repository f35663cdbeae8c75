"""How the host decides whether the streams of a GPU signal and wait by memory operations or by kernels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from symm_overlap import _C
from symm_overlap.runtime.cuda import memory_operations
from symm_overlap.runtime.cuda.memory_operations import stream_waits


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, str]]:
    """Four GPUs, with the reason why shared memory cannot be pinned for each. GPU 2 has no memory operations."""
    refused = dict.fromkeys(range(4), "")
    monkeypatch.setattr(_C, "with_cuda", True)
    monkeypatch.setattr(_C, "has_memory_operations", lambda index: index != 2, raising=False)
    monkeypatch.setattr(_C, "pinning_refused", refused.__getitem__, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("SYMM_OVERLAP_STREAM_WAITS", raising=False)
    caches = memory_operations._has_memory_operations, memory_operations._may_pin
    for cache in caches:
        cache.cache_clear()
    yield refused
    for cache in caches:
        cache.cache_clear()


cuda = partial(torch.device, "cuda")


@pytest.mark.parametrize(("said", "found"), [("0", False), ("", False), ("1", True), (None, True)])
def test_streams_wait_by_memory_operations_unless_told_not_to(
    gpus: dict[int, str], said: str | None, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said is not None:
        monkeypatch.setenv("SYMM_OVERLAP_STREAM_WAITS", said)
    assert stream_waits(cuda(3)) == found
    assert not stream_waits(cuda(2)), "GPU 2 has no memory operations"


def test_where_shared_memory_cannot_be_pinned_kernels_wait_and_the_rank_warns_once(gpus: dict[int, str]) -> None:
    gpus[2] = gpus[3] = "ulimit\nand more"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert [stream_waits(cuda(index)) for index in (1, 2, 3, 3)] == [True, False, False, False]
        assert stream_waits(cuda(3), shared=False), "memory of a single process, as in benchmarks, need not be shared"
    assert [str(each.message) for each in said] == ["symm_overlap: kernels wait for signals on cuda:3: ulimit"]
