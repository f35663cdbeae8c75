"""The flags of a GPU, in memory of the host here: how the host learns about a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from bench.harness.triton_gpu import NativeFlags
from symm_overlap import _C
from symm_overlap.collective.exchange.fused import flagged
from symm_overlap.collective.exchange.fused.stream_flags import StreamFlags
from symm_overlap.kernels.configuration import INTERPRETER
from symm_overlap.kernels.flags import EPOCH, TIMED_OUT, Caller, Expired
from symm_overlap.kernels.place import Machine
from symm_overlap.runtime import state_of
from tests.collective.test_fused import FUSED, fused
from tests.kernels.interpreted import CALLER, kernels
from tests.kernels.test_all_gather_matmul import evenly, factor
from tests.ranks import Pool, Rank
from tests.transforms import comparing


def new_flags() -> Any:
    """Return flags in memory that is not pinned, for a CPU without streams."""
    zeros = torch.zeros
    with (
        mock.patch.object(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options)),
        mock.patch.object(_C, "CudaFlags", NativeFlags, create=True),
    ):
        return StreamFlags(torch.device("cpu"), in_memory=False)


def told_by_the_device(me: Rank) -> None:
    flags, made = new_flags(), factor(torch.ones(16, 4), torch.ones(4, 4))
    good, bad = CALLER, Caller("all_gather_matmul", "g", 3, 0, 4, 2)
    calls = [(good, True), (bad, False), (good, True), (bad, False)]
    for number, (caller, comes) in enumerate(calls):
        flags.begin(8, 20e-6 if not comes else 10.0, caller)
        for chunk in range(8 if comes else 3):
            flags.up(chunk)
        at = evenly(0, 4, 4, 2), Machine(INTERPRETER, 2)
        kernels("all_gather_matmul").all_gather_matmul(torch.ones(4, 4), torch.ones(16, 4), [made], flags, *at)
        assert flags.failure() == (Expired(3, 2, 1, bad) if number >= 2 else None), "not known yet"
        flags.native.end()
        # Later calls change neither the first failure nor its caller.
        assert flags.failure() == (Expired(3, 2, 1, bad) if number >= 1 else None)
    assert str(flags.failure()) == (
        "symm_overlap: all_gather_matmul, group 'g' (lane 3), rank 0 of 4: its kernel has waited until its deadline "
        "for chunk 1 of rank 1: expected epoch 2, found 1"
    )


def told_to_the_program(me: Rank, lane: int) -> None:
    with fused(2), symm_overlap.lane(lane), comparing(False):
        FUSED["all_gather_matmul"](me.group_name)
        flags = flagged._flags[state_of(me.group).lane(me.group, me.device, lane)][False]
        symm_overlap.raise_failures()
        flags.status[:EPOCH] = torch.tensor([TIMED_OUT, 3, 1, 0])
        message = (
            rf"all_gather_matmul, group '{me.group_name}' \(lane {lane}\), rank {me.rank} of 2: .* chunk 1 of rank 1"
        )
        with pytest.raises(dist.DistBackendError, match=message):
            symm_overlap.raise_failures()
        symm_overlap.raise_failures()  # each failure is raised once here
        with pytest.raises(dist.DistBackendError, match=message):
            FUSED["matmul_all_reduce"](me.group_name)


def test_a_wait_past_its_deadline_is_told_with_the_call_that_it_was_in(ranks: Pool) -> None:
    ranks.run(1, told_by_the_device)


def test_raise_failures_and_the_next_call_raise_it(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, told_to_the_program, fresh_lane())


def test_words_of_the_status_line_are_the_same_for_host_and_device() -> None:
    pytest.importorskip("triton")
    from symm_overlap.kernels import device, flags

    for name in ("EPOCH", "LINE", "TIMED_OUT", "MISSED"):
        assert getattr(device, name).value == getattr(flags, name)
