"""With `plan_prefetch`, results stay those of plain training, ranks agree, and a plan can be replaced or reset."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from symm_overlap.fsdp import Auto, Bytes, Depth, apply, plan_prefetch
from symm_overlap.fsdp.prefetch.policy import bytes_of, policy_of
from symm_overlap.fsdp.prefetch.step_plan import Options
from tests.fsdp.models import Model, built, data, groups, logged, sharded
from tests.quick import one_in
from tests.ranks import Pool, Rank

ORDERS: list[Sequence[int]] = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 3), (0, 1, 0, 2, 3), (3, 2, 1, 0), (1,), (0, 1, 2, 3)]


def same_as_plain_training(me: Rank, policy: str) -> list[str]:
    """Skip modules, run them twice and in another order after planning, and return the warnings. The parameters must be
    those of one process that trains on the batches of all ranks."""
    plain = built(ends=True)
    model = sharded(me, copy.deepcopy(plain))
    plan = plan_prefetch(model, policy, verbose=False)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, model)]
    said: list[str] = []
    for number, order in enumerate(ORDERS):
        plain.order = model.order = order
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(data(me, number)).square().sum().backward()
        said += [str(each.message) for each in caught if "symm_overlap" in str(each.message)]
        for rank in range(me.world):
            batch = data(Rank(rank, me.world, me.group, me.device, me.groups), number)
            (plain(batch).square().sum() / me.world).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
        for block in (*model.blocks, model):
            assert all(group._all_gather_result is None for group in groups(block)), "no gather may be left pending"
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-12, atol=1e-12)  # type: ignore[attr-defined]
    assert plan.status == "planned"
    assert plan.note
    return said


def all_policies_train_as_plain_training(me: Rank) -> list[list[str]]:
    return [same_as_plain_training(me, policy) for policy in ("depth=3", "bytes=4KB", "auto")]


@pytest.mark.parametrize("world", one_in(3, [1, 2, 3], first=1))
def test_results_are_right_when_the_order_changes_after_planning_and_one_warning_says_so(
    ranks: Pool, world: int
) -> None:
    for found in ranks.run(world, all_policies_train_as_plain_training):
        for said in found:
            (warning,) = said
            assert "in another order than in the step that was planned" in warning
            assert "reset() the plan" in warning


def two_orders_in_every_step(me: Rank) -> str:
    model = sharded(me, built())
    plan = plan_prefetch(model, "depth=2", verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            found = []
            for model.order in ((0, 1, 2, 3), (2, 1, 0)):
                found.append(model(data(me, number)))
            (found[0] * found[1]).sum().backward()
    return plan.note


def test_forwards_of_two_orders_in_every_step_are_no_change(ranks: Pool) -> None:
    assert ranks.run(2, two_orders_in_every_step) == ["", ""]


def evaluates_with_changed_parameters(me: Rank) -> None:
    """Skip a module that others gathered ahead, change its parameters, and then run it."""
    model = sharded(me, built())
    plan = plan_prefetch(model, "depth=3", verbose=False)
    x = data(me, 0)
    model(x).sum().backward()
    for gradients in (torch.no_grad, torch.enable_grad):
        model.order = (0, 3)
        with gradients(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(x)
        with torch.no_grad():
            for parameter in model.blocks[1].parameters():
                parameter.mul_(2)
        model.order = (0, 1)
        with torch.no_grad():
            found = model(x)
            whole = built()
            for mine, theirs in zip(whole.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs.full_tensor())  # type: ignore[attr-defined]
            whole.order = model.order
            torch.testing.assert_close(found, whole(x), rtol=1e-12, atol=1e-12)
    plan.reset()


def test_a_module_that_was_skipped_is_gathered_anew(ranks: Pool) -> None:
    """Torch alone would use old parameters: those that were gathered ahead for the forward that skipped the module."""
    ranks.run(2, evaluates_with_changed_parameters)


def plans_again_and_resets(me: Rank) -> None:
    model = sharded(me, built())
    model(data(me, 0)).sum().backward()  # torch initializes FSDP
    first, second = model.blocks[0], model.blocks[1]
    first.set_modules_to_forward_prefetch([second])  # type: ignore[operator]
    lists = [(list(s._states_to_forward_prefetch), list(s._states_to_backward_prefetch)) for s in states(model)]
    attributes = [set(vars(group)) for block in (*model.blocks, model) for group in groups(block)]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    plans = []
    for policy in ("depth=1", Depth(2), "auto"):
        plans.append(plan_prefetch(model, policy, verbose=False))
        model(data(me, 0)).sum().backward()
    assert [plan.status for plan in plans] == ["reset", "reset", "planned"], "a new plan must reset the old one"
    plans[-1].reset()
    plans[-1].reset()
    never = plan_prefetch(model, "depth=1", verbose=False)
    never.reset()
    model(data(me, 0)).sum().backward()
    assert never.status == "reset", "a plan can also be reset before it records a step"
    assert lists == [(s._states_to_forward_prefetch, s._states_to_backward_prefetch) for s in states(model)]
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert attributes == [set(vars(group)) for block in (*model.blocks, model) for group in groups(block)]


def states(model: Model) -> list[Any]:
    return [block._get_fsdp_state() for block in (*model.blocks, model)]  # type: ignore[operator]


def test_reset_gives_back_what_was_there(ranks: Pool) -> None:
    ranks.run(2, plans_again_and_resets)


def different_on_ranks(me: Rank, what: str) -> tuple[str, str, list[str]]:
    model = sharded(me, built())
    policies = {"policy": "depth=1", "policy, one of which skips the first step": "auto"}
    policy = "depth=2" if me.rank and what in policies else policies.get(what, "auto")
    plan = plan_prefetch(model, policy, verbose=False)
    if what == "order":  # the blocks are alike, so torch notices nothing
        model.order = (0, 1, 2, 3) if me.rank == 0 else (1, 0, 2, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            model(data(me, number)).sum().backward()
    before = states(model)
    assert not any(state._states_to_forward_prefetch or state._states_to_backward_prefetch for state in before)
    return plan.status, plan.note, [str(each.message) for each in caught if "symm_overlap" in str(each.message)]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("policy", "ranks 0 and 1 differ in the policy"),
        ("policy, one of which skips the first step", "ranks 0 and 1 differ in the policy"),
        ("order", "ranks 0 and 1 differ in the order in which modules ran"),
    ],
)
def test_ranks_that_differ_leave_prefetching_to_torch(ranks: Pool, what: str, said: str) -> None:
    for status, note, warned in ranks.run(2, different_on_ranks, what):
        assert (status, note) == ("left to torch", said)
        assert warned == [f"symm_overlap: prefetching is left to torch: {said}"]


def slow_on_one_rank(me: Rank) -> tuple[Any, ...]:
    """Every rank measures its own times, and one is slow. All must have the same plan, across both mesh dimensions."""
    import time

    model = built()
    mesh = init_device_mesh("cpu", (2, me.world // 2), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if me.rank == me.world - 1:
        model.blocks[1].up.register_forward_hook(lambda *unused: time.sleep(0.05))  # type: ignore[union-attr]
    plan = plan_prefetch(model, "auto", verbose=False)
    while plan.status == "recording":
        model(data(me, 0)).sum().backward()
    assert plan.trace is not None
    slowest = max(call.compute for call in plan.trace.calls)
    assert slowest > 50, "the times must be those of the slowest rank"
    return plan.prefetch, plan.trace


def test_ranks_agree_on_the_times_of_the_slowest(fresh_ranks: Any) -> None:
    found = fresh_ranks(4).run(4, slow_on_one_rank)
    assert found == [found[0]] * 4


def accumulates(me: Rank) -> str:
    """The plan records the first step that reduces gradients. It ignores evaluation and a step that raised."""
    model = sharded(me, built(ends=True))
    plan = plan_prefetch(model, "depth=2")
    with torch.no_grad():
        model(data(me, 0))
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    model(data(me, 0)).sum().backward()
    assert plan.status == "recording"
    model.set_requires_gradient_sync(True)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="shape"):
        model(data(me, 0, width=9))
    model._get_fsdp_state()._state_ctx.iter_forward_root = None  # type: ignore[operator]
    model._get_fsdp_state()._training_state = model.blocks[0]._get_fsdp_state()._training_state  # type: ignore[operator]
    for group in groups(model):
        group._training_state = groups(model.blocks[0])[0]._training_state
    said = io.StringIO()
    with logged(model) as log, contextlib.redirect_stderr(said):
        model(data(me, 0)).sum().backward()
    assert said.getvalue() == (f"{plan}\n" if me.rank == 0 else ""), "only rank 0 may print the plan"
    assert plan.status == "planned"
    assert plan.trace is not None
    assert [call.what for call in plan.trace.calls].count("begin") == 1
    assert ("reduce-scatter", "L0") in log
    return str(plan)


def options_of(me: Rank) -> None:
    for change, expected in (
        (lambda model: None, Options()),
        (apply, Options(one_communicator=False)),
        (lambda model: model.set_reduce_scatter_max_input_buffers(2), Options(reduce_inputs=2)),
    ):
        model = sharded(me, built())
        try:
            change(model)
        except AttributeError:  # torch 2.11 has no such setting and keeps one input
            continue
        plan = plan_prefetch(model, "depth=1", verbose=False)
        model(data(me, 0)).sum().backward()
        assert (plan.status, plan.options) == ("planned", expected)


def test_a_plan_knows_how_the_model_communicates(ranks: Pool) -> None:
    ranks.run(2, options_of)


def test_the_step_that_reduces_gradients_is_the_one_that_is_planned(ranks: Pool) -> None:
    for text in ranks.run(2, accumulates):
        lines = text.splitlines()
        assert lines[0] == "prefetch depth=2: planned"
        assert lines[1].startswith("predicted step ")
        assert "with torch's default" in lines[1]
        assert "blocks.1: forward blocks.2, blocks.3; backward blocks.0" in lines
        assert "the model: forward blocks.0, blocks.1; backward blocks.3, blocks.2" in lines


def test_what_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="apply fully_shard first"):
        plan_prefetch(model)
    for policy in ("depth", "depth=-1", "depth=x", "bytes", "bytes=", "bytes=1XB", "auto=", "best", "", "depth=1=2"):
        with pytest.raises(ValueError, match=r"prefetch policy|size"):
            plan_prefetch(model, policy)
    for make in (lambda: Depth(-1), lambda: Bytes("-1"), lambda: Auto("many")):
        with pytest.raises(ValueError, match=r"depth=-1|size"):
            make()


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("depth=2", Depth(2)),
        ("bytes=64 MiB", Bytes("64MiB")),
        ("auto", Auto()),
        ("auto=1.5GB", Auto("1.5GB")),
    ],
)
def test_policies_have_texts(text: str, policy: Any) -> None:
    assert policy_of(text) == policy
    assert policy_of(policy) is policy
    assert policy_of(str(policy)) == policy


def test_sizes_are_bytes() -> None:
    assert [bytes_of(size) for size in (0, "7", "2KB", "2KiB", "1.5 MiB")] == [0, 7, 2000, 2048, 3 << 19]
    assert bytes_of(2**53 + 1) == 2**53 + 1, "a size is exact"
    assert bytes_of("9" * 400) == int("9" * 400), "a size may be larger than a float"
