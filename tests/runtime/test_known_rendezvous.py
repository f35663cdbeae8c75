"""Ranks meet once for memory on a GPU. Later rendezvous for it look into a table."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from symm_overlap.runtime import symmetric


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The rendezvous of torch, as (name of the group, bytes), which return their number. Nothing needs a GPU."""
    found: list[tuple[str, int]] = []

    def meet(tensor: torch.Tensor, name: str) -> Any:
        found.append((name, tensor.untyped_storage().nbytes()))
        return len(found)

    monkeypatch.setattr(symmetric.symm_mem, "rendezvous", meet)
    monkeypatch.setattr(symmetric, "rendezvous_name", lambda group: f"of {group.size()}")
    monkeypatch.setattr(symmetric, "lasting", lambda make, device: make())
    return found


def test_ranks_meet_once_for_one_memory_in_one_group(met: list[tuple[str, int]]) -> None:
    group, larger = (dist.ProcessGroup(0, size) for size in (2, 3))
    memory = torch.empty(4, device="meta")
    assert symmetric.rendezvous(memory, group) == 1
    assert symmetric.rendezvous(memory[2:], group) == 1, "another part of the same memory"
    assert symmetric.rendezvous(memory, larger) == 2
    assert symmetric.rendezvous(torch.empty(4, device="meta"), group) == 3
    assert met == [("of 2", 16), ("of 3", 16), ("of 2", 16)]


def test_nothing_is_known_of_memory_that_is_gone(met: list[tuple[str, int]]) -> None:
    group = dist.ProcessGroup(0, 2)
    before = len(symmetric._met)
    memory = torch.empty(4, device="meta")
    symmetric.rendezvous(memory, group)
    assert len(symmetric._met) == before + 1
    del memory
    gc.collect()
    assert len(symmetric._met) == before
    memory = torch.empty(4, device="meta")
    symmetric.rendezvous(memory, group)
    assert len(met) == 2
