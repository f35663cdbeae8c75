"""What is recorded of a step: the times of layers and of collectives, which are known here."""

from __future__ import annotations

import time

import torch

from symm_overlap.fsdp import plan_prefetch
from symm_overlap.fsdp.prefetch.trace import POST_BACKWARD, POST_FORWARD
from tests.fsdp.sleeping import sleeping

COMPUTE, GATHER = 4.0, 2.0


def test_times_of_layers_and_collectives_are_recorded_apart() -> None:
    with sleeping("cpu", lambda ms: time.sleep(ms / 1e3), COMPUTE, GATHER, 3) as model:
        plan = plan_prefetch(model, "depth=1", verbose=False)
        start = time.perf_counter()
        model(torch.ones(2, 64, requires_grad=True)).sum().backward()
        taken = (time.perf_counter() - start) * 1e3
    assert plan.status == "planned", "on a group without peers too"
    assert plan.trace is not None
    root, *layers = plan.trace.layers
    assert not root.has_parameters
    assert all(layer.gather >= GATHER and layer.reduce >= GATHER for layer in layers)
    assert all(layer.nbytes == 64 * 4 for layer in layers)
    forwards, backwards = (
        [call.compute for call in plan.trace.calls if call.what == what] for what in (POST_FORWARD, POST_BACKWARD)
    )
    assert min(forwards) >= COMPUTE
    assert sum(backwards) >= 2 * 3 * COMPUTE
    # Nothing counts twice: a gather is not compute, and the other way round.
    computed = sum(call.compute for call in plan.trace.calls)
    moved = sum(2 * layer.gather + layer.reduce + 2 * layer.copy_out + layer.copy_in for layer in layers)
    assert computed + moved <= taken
    assert plan.default is not None
    assert plan.default.step <= computed + moved
    assert plan.default.exposed >= 2 * GATHER, "the first gather and the last reduce-scatter, whatever is prefetched"
