"""With a plan, no module runs with parameters that were gathered before they changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import symm_overlap.fsdp
from symm_overlap.fsdp import plan_prefetch
from tests.fsdp.models import Model, built, data, groups, sharded
from tests.ranks import Pool, Rank


def raises(me: Rank, model: Any, plan: Any) -> None:
    """Run a forward that raises after its first block, which has gathered others ahead."""
    hook = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
    with pytest.raises(ZeroDivisionError):
        model(data(me, 0))
    hook.remove()


def runs_a_part(me: Rank, model: Any, plan: Any) -> None:
    with torch.no_grad():
        model.blocks[0](data(me, 0))


def skips_and_resets(me: Rank, model: Any, plan: Any) -> None:
    model.order = (0, 3)
    model(data(me, 0))
    plan.reset()


def changes_parameters(me: Rank, leaves: Callable[..., None], gradients: bool) -> None:
    model = sharded(me, built())
    plan = plan_prefetch(model, "depth=2", verbose=False)
    x = data(me, 0)
    model(x).sum().backward()
    with torch.set_grad_enabled(gradients), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        leaves(me, model, plan)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        whole = built()
        with torch.no_grad():
            for mine, theirs in zip(whole.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs.full_tensor())  # type: ignore[attr-defined]
        model.order = whole.order
        torch.testing.assert_close(model(x), whole(x), rtol=1e-12, atol=1e-12)


def all_ways(me: Rank) -> None:
    for leaves in (raises, runs_a_part, skips_and_resets):
        for gradients in (False, True):
            changes_parameters(me, leaves, gradients)


def test_parameters_that_change_after_something_unusual_are_gathered_anew(ranks: Pool) -> None:
    ranks.run(2, all_ways)


def memory_is_made_with_the_plan(me: Rank) -> list[int]:
    """Return the number of slots for gathers before the plan, with the plan, and after another step."""
    model: Any = sharded(me, built())
    symm_overlap.fsdp.apply(model)

    def count() -> int:
        (params,) = groups(model.blocks[0])
        comm = params._all_gather_comm
        return int(comm._memory.slots("FSDP all-gather", params._all_gather_process_group, me.device).count)

    found = [count()]
    plan_prefetch(model, "depth=3", verbose=False)
    for _ in range(2):
        model(data(me, 0)).sum().backward()
        found.append(count())
    return found


def test_slots_are_made_with_the_plan_and_not_in_a_step(ranks: Pool) -> None:
    assert ranks.run(2, memory_is_made_with_the_plan) == [[2, 5, 5]] * 2


def applied_too_late(me: Rank) -> tuple[str, str]:
    model: Model = sharded(me, built())
    plan = plan_prefetch(model, "depth=2", verbose=False)
    symm_overlap.fsdp.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(data(me, 0)).sum().backward()
    return plan.status, plan.note


def test_a_plan_that_saw_no_communication_is_left_to_torch(ranks: Pool) -> None:
    for status, note in ranks.run(2, applied_too_late):
        assert status == "left to torch"
        assert "call apply before plan_prefetch" in note


def accumulated_without_resharding(me: Rank) -> tuple[str, str]:
    model: Any = nn.Sequential(*(nn.Linear(8, 8).double() for _ in range(3)))
    for module in (model[0], model):
        fully_shard(module, mesh=DeviceMesh.from_group(me.group, "cpu"), reshard_after_forward=False)
    plan = plan_prefetch(symm_overlap.fsdp.apply(model), "depth=2", verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last)
            model(data(me, 0)).square().sum().backward()
    return plan.status, plan.note


def test_a_plan_of_a_pass_that_gathers_nothing_says_so(ranks: Pool) -> None:
    for status, note in ranks.run(2, accumulated_without_resharding):
        assert status == "left to torch"
        assert "still gathered from an earlier pass" in note


def parts(me: Rank) -> None:
    several = torch.nn.ModuleList([sharded(me, built()), sharded(me, built(1))])
    with pytest.raises(ValueError, match="2 sharded modules that are not inside another"):
        plan_prefetch(several)
    model: Any = several[0]
    model(data(me, 0))
    with pytest.raises(ValueError, match="part of a larger one"):
        plan_prefetch(model.blocks[0])


def test_a_plan_is_for_one_whole_model(ranks: Pool) -> None:
    ranks.run(2, parts)
