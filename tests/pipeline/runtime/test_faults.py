"""A failure on one rank ends the step on all ranks with a message, and no rank waits for ever."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import symm_overlap
from symm_overlap.pipeline import Schedule
from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.runtime import PipelineRuntime, Stage
from tests.limits import SOON
from tests.pipeline.runtime.models import Layer, assert_gradients, batch, gradients, reference, squared
from tests.pipeline.runtime.test_contract import TRANSPORTS, runtime_of
from tests.ranks import Pool, Rank, RankError
from tests.runtime.captures import captures_on_cpu


class Failing(nn.Module):
    """A layer that fails in the forward or in the backward of one call."""

    def __init__(self, stage: int, fails_at: int, where: str) -> None:
        super().__init__()
        self.layer, self.fails_at, self.where, self.calls = Layer(stage), fails_at, where, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layer(x)
        if self.calls == self.fails_at and self.where == "forward":
            raise ArithmeticError("planted in the forward")
        if self.calls == self.fails_at and self.where == "backward":
            out.register_hook(self._fail)
        return out

    def _fail(self, gradient: Tensor) -> None:
        raise ArithmeticError("planted in the backward")


def fails(me: Rank, lane: int, name: str, failing: int, fails_at: int, where: str, transport: str) -> None:
    count = me.world * (2 if name == "ZBV" else 1)
    modules: list[nn.Module] = [Layer(stage) for stage in range(count)]
    modules[failing] = Failing(failing, fails_at, where)
    with symm_overlap.lane(lane), symm_overlap.timeout(20):
        runtime = runtime_of(me, name, 4, modules, loss=squared, transport=transport)
        began = time.monotonic()
        error: BaseException | None = None
        x, target = batch(4)
        try:
            for _ in range(4):
                runtime.step(x, target=target)
        except (ArithmeticError, dist.DistBackendError, RuntimeError) as caught:
            error = caught
        assert time.monotonic() - began < SOON
        if runtime.schedule.rank_of(failing) == me.rank:
            assert isinstance(error, ArithmeticError), error
            assert f"planted in the {where}" in str(error)
        else:
            assert isinstance(error, (dist.DistBackendError, RuntimeError)), error
        dist.barrier(me.group)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("fails_at", [2, 12])  # in the first step, and at the last microbatch of a later step
@pytest.mark.parametrize(("name", "failing"), [("1F1B", 0), ("1F1B", 1), ("1F1B", 2), ("ZBV", 4)])
def test_a_stage_that_fails_ends_the_step_on_every_rank(
    ranks: Pool, fresh_lane: Any, name: str, failing: int, fails_at: int, where: str, transport: str
) -> None:
    ranks.run(3, fails, fresh_lane(), name, failing, fails_at, where, transport)


def goes_on(me: Rank, lane: int) -> None:
    modules: list[nn.Module] = [Failing(0, 2, "forward"), Layer(1)]
    whole = [Layer(0), Layer(1)]
    with symm_overlap.lane(lane):
        runtime = runtime_of(me, "1F1B", 4, modules, loss=squared, transport="c10d")
        x, target = batch(4)
        with pytest.raises((ArithmeticError, dist.DistBackendError)):
            runtime.step(x, target=target)
        modules[me.rank].zero_grad()
        runtime.step(x, target=target)
    wanted = reference(whole, x, target, 4)[2]
    found = gradients(modules[0].layer if me.rank == 0 else modules[1])
    assert_gradients(found, wanted[me.rank])


def test_over_torch_distributed_the_next_step_finds_nothing_of_the_failed_one(ranks: Pool, fresh_lane: Any) -> None:
    ranks.run(2, goes_on, fresh_lane())


def during_a_capture(me: Rank, lane: int, transport: str) -> None:
    """Rank 0 captures a graph. Its step is refused, before and after the first step, and the ranks stay in step."""
    modules: list[nn.Module] = [Layer(0), Layer(1)]
    x, target = batch(4)
    with symm_overlap.lane(lane):
        runtime = runtime_of(me, "1F1B", 4, modules, loss=squared, transport=transport)
        for _ in range(3):
            if me.rank == 0:
                with captures_on_cpu(), pytest.raises(RuntimeError, match="pipeline step cannot be captured"):
                    runtime.step(x, target=target)
            modules[me.rank].zero_grad()
            runtime.step(x, target=target)
    wanted = reference([Layer(0), Layer(1)], x, target, 4)[2]
    assert_gradients(gradients(modules[me.rank]), wanted[me.rank])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_step_is_refused_while_a_graph_is_captured(ranks: Pool, fresh_lane: Any, transport: str) -> None:
    ranks.run(2, during_a_capture, fresh_lane(), transport)


def goes_on_elsewhere(me: Rank, lanes: tuple[int, int]) -> None:
    x, target = batch(4)
    with symm_overlap.lane(lanes[0]), symm_overlap.timeout(20):
        runtime = runtime_of(me, "1F1B", 4, [Failing(0, 7, "forward"), Layer(1)], loss=squared, transport="symmetric")
        runtime.step(x, target=target)
        advice = "planted" if me.rank == 0 else r"rank 0 .*Its own output says why\. Calls can go on .* on another lane"
        with pytest.raises(ArithmeticError if me.rank == 0 else dist.DistBackendError, match=advice):
            runtime.step(x, target=target)
        with pytest.raises(RuntimeError, match=r"lane \d+ of pipelines .*out of step .* use another lane"):
            runtime.step(x, target=target)
    whole, mine = ([Layer(0), Layer(1)] for _ in range(2))
    wanted = reference(whole, x, target, 4)[2][me.rank]
    with symm_overlap.lane(lanes[1]):
        runtime = runtime_of(me, "1F1B", 4, list(mine), loss=squared, transport="symmetric")
        for _ in range(2):
            mine[me.rank].zero_grad()
            runtime.step(x, target=target)
            assert_gradients(gradients(mine[me.rank]), wanted)


def test_through_symmetric_memory_the_pipeline_goes_on_in_another_lane(ranks: Pool, fresh_lane: Any) -> None:
    ranks.run(2, goes_on_elsewhere, (fresh_lane(), fresh_lane()))


def dies(me: Rank, steps: int, transport: str) -> str:
    modules: list[nn.Module] = [Layer(stage) for stage in range(me.world)]
    with symm_overlap.timeout(30):
        runtime = runtime_of(me, "1F1B", 8, modules, loss=squared, transport=transport)
        x, target = batch(8)
        for _ in range(steps):
            runtime.step(x, target=target)
        if me.rank == 1:
            modules[1].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        began = time.monotonic()
        try:
            runtime.step(x, target=target)
        except RuntimeError as error:
            assert time.monotonic() - began < SOON
            return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_rank_that_is_killed_is_noticed_by_all_others(steps: int, transport: str) -> None:
    with Pool(3) as pool:
        outcomes = pool.submit((0, 1, 2), dies, steps, transport).outcomes(60)
    for rank in (0, 2):
        assert outcomes[rank].failure is None, outcomes[rank].failure
        assert "nothing was raised" not in outcomes[rank].value
        assert "rank 1" in outcomes[rank].value, outcomes[rank].value


def different(me: Rank) -> None:
    name = "1F1B" if me.rank == 0 else "GPipe"
    runtime = runtime_of(me, name, 4, [Layer(stage) for stage in range(me.world)], loss=squared)
    x, target = batch(4)
    with pytest.raises(ValueError, match="differ in their schedule"):
        runtime.step(x, target=target)


def test_ranks_with_different_schedules_are_told(ranks: Pool) -> None:
    ranks.run(3, different)


def other_shapes(me: Rank, lane: int, transport: str) -> None:
    with symm_overlap.lane(lane), symm_overlap.timeout(20):
        runtime = runtime_of(
            me, "1F1B", 4, [Layer(stage) for stage in range(me.world)], loss=squared, transport=transport
        )
        runtime.step(*batch(4)[:1], target=batch(4)[1])
        x, target = (torch.cat([each, each]) for each in batch(4))
        if transport == "c10d":
            runtime.step(x, target=target)
        else:
            message = (
                "Messages through symmetric memory must have the shapes of the first step" if me.rank == 0 else "rank 0"
            )
            with pytest.raises(ValueError if me.rank == 0 else dist.DistBackendError, match=message):
                runtime.step(x, target=target)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_shapes_that_change_are_refused_where_memory_is_laid_out_for_them(
    ranks: Pool, fresh_lane: Any, transport: str
) -> None:
    ranks.run(2, other_shapes, fresh_lane(), transport)


def wrong_batches(me: Rank, lane: int) -> None:
    x, target = batch(4)
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((x[:3],), {"target": target}, "cannot be cut into 4 microbatches"),
        ((), {"target": target}, "forward"),
    ]
    for args, kwargs, message in cases:
        with symm_overlap.lane(lane), symm_overlap.timeout(20):
            runtime = runtime_of(me, "GPipe", 4, [Layer(0), Layer(1)], loss=squared, transport="c10d")
            with pytest.raises((ValueError, TypeError, dist.DistBackendError), match=message if me.rank == 0 else ""):
                runtime.step(*args, **kwargs)
    with pytest.raises(RuntimeError, match="call eval"), torch.no_grad():
        runtime.step(x, target=target)
    with pytest.raises(TypeError, match="must be a list"):
        runtime.step(x, target=target, losses=())  # type: ignore[arg-type]


def test_wrong_batches_are_refused_on_every_rank(ranks: Pool, fresh_lane: Any) -> None:
    ranks.run(2, wrong_batches, fresh_lane())


def wrong_runtimes(me: Rank) -> None:
    right = [Stage(Layer(me.rank), me.rank)]
    schedule = generate("1F1B", ranks=me.world, microbatches=4)
    halting = Schedule.from_rows([row[1:] for row in schedule.rows], schedule.placement, 4)
    rows = [[action for action in row if action and action.kind == "F"] for row in schedule.rows]
    forwards = schedule.with_rows(rows)
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (Stage(Layer(0), 5), schedule, {}, "places stages"),
        (right, generate("1F1B", ranks=3, microbatches=4), {}, "is for 3 ranks"),
        (right, schedule, {"microbatches": 8}, "microbatches is 8"),
        (right, halting, {}, "cannot run|does not hold"),
        (right, "no such", {}, "no such"),
        (right, forwards, {"loss": squared}, "would train nothing"),
        (right, schedule, {"transport": "pigeon"}, "transport is 'pigeon'"),
        (right, schedule, {"tied": [[(0, "weight"), (7, "weight")]]}, "stage 7"),
        (right, schedule, {"tied": [[(me.rank, "none")]]}, "no such parameter"),
        (Stage(nn.Linear(1, 1, device="meta"), me.rank), schedule, {}, "'meta': give device="),
    ]
    for stages, given, options, message in cases:
        with pytest.raises(ValueError, match=message):
            PipelineRuntime(stages, given, group=me.group, **options)


def test_a_runtime_that_cannot_work_is_refused_when_it_is_made(ranks: Pool) -> None:
    ranks.run(2, wrong_runtimes)


class Odd(nn.Module):
    """A stage whose output cannot be sent."""

    def forward(self, x: Tensor) -> Any:
        return {"x": x}


def odd_outputs(me: Rank, lane: int) -> None:
    with symm_overlap.lane(lane):
        runtime = runtime_of(me, "GPipe", 4, [Odd(), Layer(1)], transport="c10d")
        with pytest.raises(TypeError if me.rank == 0 else dist.DistBackendError, match="a tuple of tensors"):
            runtime.eval(batch(4)[0])


def test_what_a_stage_cannot_send_is_said_on_every_rank(ranks: Pool, fresh_lane: Any) -> None:
    ranks.run(2, odd_outputs, fresh_lane())


def test_a_failing_rank_shows_where(ranks: Pool) -> None:
    with Pool(1) as pool, pytest.raises(RankError, match=r"in the plan's step: F chunk 0.1 0F1"):
        pool.run(1, fails_alone)


def fails_alone(me: Rank) -> None:
    runtime_of(me, "1F1B", 4, [Failing(0, 2, "forward")], loss=squared).step(*batch(4)[:1], target=batch(4)[1])


def late_with_a_tied_parameter(me: Rank, lane: int) -> None:
    modules: list[nn.Module] = [Layer(stage) for stage in range(2)]
    x, target = batch(4)
    with symm_overlap.lane(lane), symm_overlap.timeout(SOON):
        runtime = runtime_of(me, "1F1B", 4, modules, loss=squared, tied=[[(0, "linear.weight"), (1, "linear.weight")]])
        for _ in range(2):
            runtime.step(x, target=target)
        if me.rank == 0:
            began = time.monotonic()
            with pytest.raises(dist.DistBackendError, match=r"rank 1 .* did not signal after"):
                runtime.step(x, target=target)
            assert time.monotonic() - began < 1.7 * SOON, "after the deadline, it must not wait for it once more"
    dist.barrier(me.group)


@pytest.mark.slow
def test_a_late_rank_with_a_tied_parameter_is_not_given_two_deadlines(ranks: Pool, fresh_lane: Any) -> None:
    ranks.run(2, late_with_a_tied_parameter, fresh_lane())
