"""Kernels can be compiled before their first launch, as `prepare` does. This test really compiles them."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from bench.harness.triton_gpu import gpu, keys
from symm_overlap.collective.exchange.fused import flagged
from symm_overlap.collective.exchange.fused.stand_in import stand_ins
from symm_overlap.collective.exchange.fused.stream_flags import StreamFlags
from symm_overlap.kernels import load
from symm_overlap.kernels._triton import load_ahead
from symm_overlap.kernels.factor import Factor
from symm_overlap.kernels.flags import FEWEST
from symm_overlap.kernels.place import Machine, Place
from tests.kernels.interpreted import CALLER


def test_a_kernel_is_compiled_and_loaded_before_it_is_launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    bfloat16 = torch.bfloat16
    rows, weight = torch.ones(512, 512, dtype=bfloat16), torch.ones(512, 256, dtype=bfloat16)
    product = torch.ones(512, 256, dtype=bfloat16)
    given, at = (rows, Factor(weight, product)), (Place(0, 512, 256, 256, 1, 2), Machine(90, 132))
    with gpu(90, compiling=True) as driver:
        flags = StreamFlags(torch.device("cpu"), in_memory=True)
        launcher = load("matmul_reduce_scatter", 90).matmul_reduce_scatter
        flags.prepare(3 * FEWEST)
        driver.stream.synchronize.assert_called_once()  # the first call may use another stream
        launcher(*stand_ins(given), flags, *at, ahead=load_ahead)
        prepared, loaded = keys(90), list(driver.loaded)
        assert driver.launched == []
        flags.begin(3 * FEWEST, 1.0, CALLER)
        launcher(*given, flags, *at)
        assert driver.launched == driver.loaded == loaded == ["matmul_reduce_scatter_kernel"]
        assert keys(90) == prepared


def test_new_flags_are_set_before_a_call_on_another_stream_can_use_them() -> None:
    call = mock.Mock()
    call.lane.device = torch.device("cpu")
    call.backend.machine.return_value = 90, 132
    with gpu(90) as driver:
        flagged._new_sets(call)
    driver.stream.synchronize.assert_called_once()
