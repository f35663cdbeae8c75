"""The overlap bound on a real GPU. Layers have a known sleep and gathers a known delay, on torch's streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from symm_overlap.fsdp import plan_prefetch
from tests.fsdp.sleeping import sleeping

pytestmark = pytest.mark.gpu

LAYERS = 6
CYCLES = 20_000_000  # about ten milliseconds, far longer than the host needs to issue a layer


def sleep(cycles: float) -> None:
    torch.cuda._sleep(int(cycles))


def milliseconds(function: Any) -> float:
    """Return the time of a function on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


@pytest.mark.parametrize("policy", ["depth=1", "depth=2", "auto"])
def test_a_step_takes_its_compute_and_the_communication_that_nothing_can_hide(policy: str) -> None:
    with sleeping("cuda", sleep, CYCLES, CYCLES, LAYERS) as model:
        x = torch.ones(8, 64, device="cuda", requires_grad=True)
        model(x).sum().backward()  # the first step also loads libraries and kernels
        plan = plan_prefetch(model, policy, verbose=False)
        while plan.status == "recording":
            model(x).sum().backward()
        assert plan.predicted is not None
        one = milliseconds(lambda: sleep(CYCLES))
        with torch.no_grad():
            forward = milliseconds(lambda: model(x))
        step = milliseconds(lambda: model(x).sum().backward())
        plan.reset()
    assert forward <= (one + LAYERS * one) * 1.05, "forward takes longer than one gather and the compute"
    # Exposed are the first gather, the last layer's gather for backward, and the last reduce-scatter.
    assert step <= (3 * one + 3 * LAYERS * one) * 1.05
    assert abs(step - plan.predicted.step) <= 0.1 * step
