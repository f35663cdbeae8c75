"""Real FSDP2 runs issue their steps in torch's documented order, and in the order of the step plan."""

from __future__ import annotations

from typing import Any

import pytest

from symm_overlap.fsdp import plan_prefetch
from symm_overlap.fsdp.prefetch.issue_order import DEFAULT
from symm_overlap.fsdp.prefetch.step_plan import Options, step_plan
from symm_overlap.plan import verify
from tests.fsdp.models import Log, Model, built, data, logged, sharded
from tests.fsdp.orders import plan_order, words
from tests.quick import one_in
from tests.ranks import Pool, Rank

FORWARD = {
    # The host issues the next gather when it begins the next layer, which may be long before that layer computes.
    "default": "gather L0, forward L0, gather L1, forward L1, gather L2, forward L2, gather L3, forward L3",
    "depth=1": "gather L0, gather L1, forward L0, gather L2, forward L1, gather L3, forward L2, forward L3",
    "depth=2": "gather L0, gather L1, gather L2, forward L0, gather L3, forward L1, forward L2, forward L3",
    "depth=4": "gather L0, gather L1, gather L2, gather L3, forward L0, forward L1, forward L2, forward L3",
}
_REDUCED = "backward L{0}, reshard L{0}, reduce-scatter L{0}"
BACKWARD = {
    "default": ["gather L3, gather L2", 3, "gather L1", 2, "gather L0", 1, 0],
    "depth=1": ["gather L3, gather L2", 3, "gather L1", 2, "gather L0", 1, 0],
    "depth=2": ["gather L3, gather L2, gather L1", 3, "gather L0", 2, 1, 0],
    "depth=4": ["gather L3, gather L2, gather L1, gather L0", 3, 2, 1, 0],
}


def step(me: Rank, model: Model, number: int = 0) -> Log:
    with logged(model) as log:
        model(data(me, number)).square().sum().backward()
    return [entry for place, entry in enumerate(log) if entry != log[place - 1]]


def planned(me: Rank, model: Model, policies: tuple[str, ...]) -> dict[str, tuple[Log, Log]]:
    """Return what a step issued and what its plan has, by policy and for torch's default. Every plan is verified."""
    found = {}
    default = step(me, model)
    for policy in policies:
        plan = plan_prefetch(model, policy, verbose=False)
        step(me, model)
        assert plan.status == "planned", plan
        assert plan.trace is not None
        found[policy] = step(me, model, 1), plan_order(plan.trace, plan.prefetch)
        assert not plan.note, plan.note
        found["default"] = default, plan_order(plan.trace, DEFAULT)
        made = step_plan(plan.trace, plan.prefetch, Options(rounds=2, event=True))
        report = verify([[made.for_rank(rank, me.world) for rank in range(me.world)]] * 2)
        assert report.ok, report
        plan.reset()
    assert step(me, model, 2) == default, "reset must restore torch's default"
    return found


def four_layers(me: Rank) -> dict[str, tuple[str, str]]:
    """Return the forward and the backward of a step as text, for the default and each depth."""
    found = {}
    for policy, (log, _) in planned(me, sharded(me, built()), ("depth=1", "depth=2", "depth=4")).items():
        cut = log.index(("forward", "L3")) + 1
        forward = words(log[:cut], ("gather", "forward"))
        found[policy] = forward, words(log[cut + 1 :], ("gather", "backward", "reshard", "reduce-scatter"))
    return found


def test_gathers_are_issued_in_torchs_documented_order(ranks: Pool) -> None:
    for found in ranks.run(2, four_layers):
        assert set(found) == set(FORWARD)
        for policy, (forward, backward) in found.items():
            assert forward == FORWARD[policy]
            parts = [_REDUCED.format(part) if isinstance(part, int) else part for part in BACKWARD[policy]]
            assert backward == ", ".join(parts), policy


CASES: dict[str, dict[str, Any]] = {
    "uneven": {"inner": (4, 40, 4, 4, 16)},
    "root with parameters": {"ends": True},
    "one kept after the forward": {"keep": [3], "ends": True},
    "one skipped": {"order": (0, 1, 3)},
    "one run twice": {"order": (0, 1, 0, 2, 3)},
    "all run twice": {"order": (0, 1, 2, 3, 0, 1, 2, 3)},
    "one run again and again": {"order": (0, 0, 0, 1), "ends": True},
    "recomputed": {"recomputes": True, "ends": True},
    "one gathered by hand": {"by_hand": [2], "ends": True},
    "one frozen": {"frozen": [1]},
    "the first frozen": {"frozen": [0], "ends": True},
    "not gathered in backward": {"inner": (8, 8, 0, 8), "no_gather_in_backward": [2]},
}
POLICIES = ("depth=0", "depth=1", "depth=2", "depth=9", "bytes=2KB", "auto")


def model_of(me: Rank, case: dict[str, Any]) -> Model:
    model = built(inner=case.get("inner", (8, 8, 8, 8)), ends=case.get("ends", False))
    for index in case.get("frozen", ()):
        model.blocks[index].requires_grad_(False)
    sharded(me, model, case.get("keep", ()))
    for index in case.get("no_gather_in_backward", ()):
        model.blocks[index].set_unshard_in_backward(False)  # type: ignore[operator]
    model.by_hand = case.get("by_hand", ())
    model.order, model.recomputes = case.get("order", model.order), case.get("recomputes", False)
    return model


def in_the_order_of_its_plan(me: Rank, names: list[str]) -> list[str]:
    """Return the differences between plans and runs, in words."""
    wrong = []
    for name in names:
        policies = POLICIES if name == "uneven" else ("depth=2", "auto")
        for policy, (run, plan) in planned(me, model_of(me, CASES[name]), policies).items():
            if run != plan:
                wrong.append(f"{name}, {policy}:\nran:  {words(run)}\nplan: {words(plan)}")
    return wrong


@pytest.mark.parametrize(("world", "names"), one_in(2, [(2, list(CASES)), (3, ["one run twice"])]), ids=["2", "3"])
def test_the_step_plan_has_the_order_of_real_runs(ranks: Pool, world: int, names: list[str]) -> None:
    for wrong in ranks.run(world, in_the_order_of_its_plan, names):
        assert not wrong, "\n\n".join(wrong)
