"""Copies that bypass the CPU's caches write the same bytes as ``copy_``, wherever they begin and end."""

from __future__ import annotations

import platform

import pytest
import torch

from symm_overlap import _C

MIB = 1 << 20


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("begin", [0, 1, 16, 63])
@pytest.mark.parametrize("nbytes", [MIB - 1, MIB, MIB + 1, 3 * MIB + 65])
def test_every_byte_arrives_and_none_beside_it(nbytes: int, begin: int, threads: int) -> None:
    source = torch.randint(0, 256, (nbytes + 7,), dtype=torch.uint8)[7:]
    room = torch.full((nbytes + 256,), 99, dtype=torch.uint8)
    begin += -room.data_ptr() % 64
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _C.copy(room[begin : begin + nbytes], source)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(room[begin : begin + nbytes], source)
    assert (room[:begin] == 99).all()
    assert (room[begin + nbytes :] == 99).all()


def test_what_does_not_lie_together_or_differs_in_dtype_is_copied_by_torch() -> None:
    """Copies of non-contiguous tensors, of broadcast rows or to another dtype are right too. torch makes them."""
    source = torch.arange(MIB, dtype=torch.float32).view(1024, 1024)
    wide = torch.zeros(1024, 1030)
    _C.copy(wide[:, 3:1027], source)
    assert torch.equal(wide[:, 3:1027], source)
    assert not wide[:, :3].any()
    turned = torch.empty(1024, 1024)
    _C.copy(turned, source.t())
    assert torch.equal(turned, source.t())
    converted = torch.empty(1024, 1024, dtype=torch.float64)
    _C.copy(converted, source)
    assert torch.equal(converted, source.double())
    row = torch.empty(1024, 1024)
    _C.copy(row, source[:1])
    assert torch.equal(row, source[:1].expand(1024, 1024))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="on other CPUs torch copies everything")
def test_a_profile_shows_large_copies() -> None:
    source, target = torch.ones(MIB), torch.empty(MIB)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _C.copy(target, source)
    assert [event.key for event in profile.key_averages()] == ["symm_overlap::copy"]
