"""The recorder measures the times of layers and of collectives separately. These times are known in the tests."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from symm_overlap.fsdp import plan_prefetch
from symm_overlap.fsdp._torch import groups_of, state_of
from symm_overlap.fsdp.prefetch import recorder
from symm_overlap.fsdp.prefetch.trace import POST_BACKWARD, POST_FORWARD
from tests.fsdp.sleeping import sleeping

COMPUTE, GATHER = 4.0, 2.0


def test_times_of_layers_and_collectives_are_recorded_apart() -> None:
    with sleeping("cpu", lambda ms: time.sleep(ms / 1e3), COMPUTE, GATHER, 3) as model:
        plan = plan_prefetch(model, "depth=1", verbose=False)
        start = time.perf_counter()
        model(torch.ones(2, 64, requires_grad=True)).sum().backward()
        taken = (time.perf_counter() - start) * 1e3
    assert plan.status == "planned", "a group without peers must be planned too"
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
    # No time counts twice: the time of a gather is not part of compute, and compute is not part of a gather.
    computed = sum(call.compute for call in plan.trace.calls)
    moved = sum(2 * layer.gather + layer.reduce + 2 * layer.copy_out + layer.copy_in for layer in layers)
    assert computed + moved <= taken
    assert plan.default is not None
    assert plan.default.step <= computed + moved
    assert plan.default.exposed >= 2 * GATHER, "the first gather and the last reduce-scatter are always exposed"


def test_a_forward_without_gradients_between_a_forward_and_its_backward_is_not_recorded() -> None:
    slow = 200.0
    with sleeping("cpu", lambda ms: time.sleep(ms / 1e3), 0.0, 0.0, 2) as model:
        plan = plan_prefetch(model, "depth=1", verbose=False)
        output = model(torch.ones(2, 64, requires_grad=True))
        gathers = [group._all_gather_comm for layer in model for group in groups_of(state_of(layer))]
        for gather in gathers:
            gather._inner.time = slow
        with torch.no_grad():
            model(torch.ones(2, 64))
        for gather in gathers:
            gather._inner.time = 0.0
        output.sum().backward()
    assert plan.trace is not None
    assert [call.what for call in plan.trace.calls].count(POST_FORWARD) == 2
    assert all(layer.gather < slow / 4 for layer in plan.trace.layers)


def test_forwards_without_a_backward_do_not_make_the_record_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_CALLS", 20)
    with sleeping("cpu", lambda ms: None, 0.0, 0.0, 2) as model:
        plan = plan_prefetch(model, "depth=1", verbose=False)
        for _ in range(9):
            model(torch.ones(2, 64, requires_grad=True))
        model(torch.ones(2, 64, requires_grad=True)).sum().backward()
        for _ in range(2):  # if the record was dropped in the last forward, the next step is recorded
            model(torch.ones(2, 64, requires_grad=True)).sum().backward()
    assert plan.status == "planned"
    assert plan.trace is not None
    assert len(plan.trace.calls) <= 20


@pytest.mark.skipif(not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="this torch has one group")
@pytest.mark.parametrize("separate", [False, True])
def test_a_group_of_their_own_lets_reduce_scatters_run_beside_gathers(separate: bool) -> None:
    with sleeping("cpu", lambda ms: None, 0.0, 0.0, 2) as model:
        model.set_separate_reduce_scatter_group(separate)
        plan = plan_prefetch(model, "depth=1", verbose=False)
        model(torch.ones(2, 64, requires_grad=True)).sum().backward()
    assert plan.options.one_communicator is not separate
