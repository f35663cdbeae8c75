"""A step handles batches, keyword arguments, several values between stages, tied parameters, and forwards alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import symm_overlap
from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.runtime import PipelineRuntime, Stage
from symm_overlap.plan import Plan, Step, Table
from symm_overlap.settings import transformed
from tests.pipeline.runtime.models import WIDTH, Layer, assert_gradients, batch, gradients, reference, squared
from tests.ranks import Pool, Rank

TRANSPORTS = ["symmetric", "c10d"]


def runtime_of(me: Rank, name: str, microbatches: int, modules: list[nn.Module], **options: Any) -> PipelineRuntime:
    """Return a runtime with the modules that the schedule places on this rank."""
    schedule = generate(name, ranks=me.world, microbatches=microbatches, stages_per_rank=len(modules) // me.world)
    mine = [Stage(modules[stage], stage) for stage in schedule.stages_of_ranks[me.rank]]
    return PipelineRuntime(mine, schedule, group=me.group, **options)


class Several(nn.Module):
    """Passes on its result, indices that have no gradient, and a value that only the last stage needs."""

    def __init__(self, stage: int, last: bool) -> None:
        super().__init__()
        self.layer, self.last = Layer(stage), last

    def forward(self, x: Tensor, index: Tensor | None = None, skipped: Tensor | None = None) -> Any:
        if index is None:
            index, skipped = torch.arange(x.shape[0]).flip(0), x * x
        assert skipped is not None
        x = self.layer(x)[index]
        return x * skipped.sum(1, keepdim=True) if self.last else (x, index, skipped)


def several_values(me: Rank, transport: str) -> None:
    whole = [Several(stage, stage == 2 * me.world - 1) for stage in range(2 * me.world)]
    mine = [Several(stage, stage == 2 * me.world - 1) for stage in range(2 * me.world)]
    runtime = runtime_of(me, "ZBV", 4, list(mine), loss=squared, transport=transport)
    for step in range(3):
        x, target = batch(4, step)
        _, _, wanted = reference(whole, x, target, 4)
        runtime.step(x, target=target)
        for stage in runtime.schedule.stages_of_ranks[me.rank]:
            assert_gradients(gradients(mine[stage]), wanted[stage])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stages_hand_on_several_values_and_relay_what_a_later_one_needs(ranks: Pool, transport: str) -> None:
    ranks.run(3, several_values, transport)


class Many(nn.Module):
    """Passes on so many values that their description is long."""

    def forward(self, *values: Tensor) -> Any:
        return tuple(values[0][:, :1] * each for each in range(60)) if len(values) == 1 else torch.cat(values, dim=1)


def many_values(me: Rank, transport: str) -> None:
    runtime = runtime_of(me, "GPipe", 2, [Many(), Many()], transport=transport)
    for _ in range(3):
        result = runtime.eval(*([torch.rand(4, 3)] if me.rank == 0 else []))
        assert result is None or result.shape == (4, 60)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stage_may_hand_on_many_values(ranks: Pool, transport: str) -> None:
    ranks.run(2, many_values, transport)


def forwards_alone(me: Rank, transport: str) -> None:
    modules: list[nn.Module] = [Layer(stage) for stage in range(me.world)]
    runtime = runtime_of(me, "1F1B", 3, modules, loss=squared, transport=transport)
    for step in range(4):
        x, target = batch(3, step)
        expected, wanted, _ = reference(modules, x, target, 3)
        losses: list[Tensor] = [torch.zeros(())]  # is cleared on a rank that has losses
        result = runtime.eval(x, target=target, losses=losses)
        if me.rank == me.world - 1:
            torch.testing.assert_close(result, expected)
            torch.testing.assert_close(losses, wanted)
            assert not result.requires_grad
        else:
            assert result is None
        for module in modules:
            module.zero_grad()
        runtime.step(x, target=target)  # eval and step must not disturb each other
        assert_gradients(
            gradients(modules[me.rank]), reference([*map(Layer, range(me.world))], x, target, 3)[2][me.rank]
        )
        modules[me.rank].zero_grad()
        assert runtime.eval(x, return_outputs=False) is None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_forwards_alone_between_steps(ranks: Pool, transport: str) -> None:
    ranks.run(3, forwards_alone, transport)


class Scaled(nn.Module):
    """A layer with keyword arguments: a tensor is cut like the batch, and a number goes to all microbatches."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.layer = Layer(stage)

    def forward(self, x: Tensor, *, rows: Tensor, power: int) -> Tensor:
        out: Tensor = self.layer(x) * rows**power
        return out


def keyword_arguments(me: Rank) -> None:
    rows = torch.rand(12, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    whole, mine = ([Scaled(stage) for stage in range(me.world)] for _ in range(2))
    runtime = runtime_of(me, "GPipe", 4, list(mine), loss=squared)
    for step in range(3):
        x, target = batch(4, step)
        for part, wanted, each in zip(x.chunk(4), target.chunk(4), rows.chunk(4), strict=True):
            value = part
            for module in whole:
                value = module(value, rows=each, power=2)
            (squared(value, wanted) / 4).backward()
        runtime.step(x, target=target, rows=rows, power=2)
        assert_gradients(gradients(mine[me.rank]), gradients(whole[me.rank]))


def test_keyword_arguments_go_to_every_stage(ranks: Pool) -> None:
    ranks.run(2, keyword_arguments)


def fewer_and_uneven(me: Rank, name: str, microbatches: int, rows: int, transport: str) -> None:
    whole, mine = ([Layer(stage) for stage in range(me.world)] for _ in range(2))
    runtime = runtime_of(me, name, microbatches, list(mine), loss=squared, transport=transport)
    for step in range(3):
        x, target = (each[:rows] for each in batch(8, step))
        _, _, wanted = reference(whole, x, target, microbatches)
        runtime.step(x, target=target)
        assert_gradients(gradients(mine[me.rank]), wanted[me.rank])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("name", "microbatches", "rows"), [("1F1B", 1, 4), ("1F1B", 2, 5), ("ZB-H1", 4, 7)])
def test_fewer_microbatches_than_stages_and_uneven_ones(
    ranks: Pool, name: str, microbatches: int, rows: int, transport: str
) -> None:
    ranks.run(4, fewer_and_uneven, name, microbatches, rows, transport)


def inputs_with_gradients(me: Rank, name: str) -> None:
    count = me.world * (2 if name == "ZBV" else 1)
    whole, mine = ([Layer(stage) for stage in range(count)] for _ in range(2))
    runtime = runtime_of(me, name, 4, list(mine), loss=squared)
    x, target = batch(4)
    x.requires_grad_()
    reference(whole, x, target, 4)
    given = x.detach().clone().requires_grad_()
    runtime.step(given, target=target)
    if 0 in runtime.schedule.stages_of_ranks[me.rank]:
        torch.testing.assert_close(given.grad, x.grad, rtol=1e-11, atol=1e-13)
    else:
        assert given.grad is None


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZBV"])
def test_a_batch_that_requires_gradients_gets_them(ranks: Pool, name: str) -> None:
    ranks.run(2, inputs_with_gradients, name)


def sum_of_losses(me: Rank) -> None:
    whole, mine = ([Layer(stage) for stage in range(me.world)] for _ in range(2))
    runtime = runtime_of(me, "1F1B", 4, list(mine), loss=squared, scale_gradients=False)
    x, target = batch(4)
    wanted = reference(whole, x, target, 4)[2][me.rank]
    runtime.step(x, target=target)
    assert_gradients(gradients(mine[me.rank]), {name: each * 4 for name, each in wanted.items() if each is not None})


def test_gradients_of_the_sum_of_losses(ranks: Pool) -> None:
    ranks.run(2, sum_of_losses)


class Embedding(nn.Module):
    """The first or the last stage of a model whose head has the weights of its embedding."""

    def __init__(self, last: bool, seed: int = 0) -> None:
        super().__init__()
        self.layer, self.last = Layer(int(last)), last
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(11, WIDTH, generator=generator, dtype=torch.float64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.last:
            return nn.functional.linear(self.layer(x), self.weight)
        made: Tensor = self.layer(nn.functional.embedding(x, self.weight))
        return made


def tied(me: Rank, name: str, transport: str) -> None:
    count = me.world * (2 if name == "ZBV" else 1)

    def model(last_seed: int) -> list[nn.Module]:
        middle = [Layer(stage) for stage in range(1, count - 1)]
        return [Embedding(False), *middle, Embedding(True, last_seed)]

    whole, mine = model(0), model(5)  # the copy starts with another value
    whole[-1].weight = whole[0].weight
    copies = [(count - 1, "weight"), (0, "weight")]
    loss = nn.functional.cross_entropy
    runtime = runtime_of(me, name, 4, mine, loss=loss, tied=[copies], transport=transport)
    optimizer = torch.optim.SGD(nn.ModuleList(whole).parameters(), lr=0.1)
    parts = runtime.schedule.stages_of_ranks[me.rank]
    own = torch.optim.SGD([each for stage in parts for each in mine[stage].parameters()], lr=0.1)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        x, target = (torch.randint(11, (12,), generator=generator) for _ in range(2))
        wanted = reference(whole, x, target, 4, loss)[2]
        runtime.step(x, target=target)
        for stage in parts:
            assert_gradients(gradients(mine[stage]), wanted[stage])
        if step % 2:  # gradients of two steps add up
            for each in (optimizer, own):
                each.step()
                each.zero_grad()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", ["1F1B", "ZBV"])
def test_tied_parameters_start_equal_and_sum_their_gradients(ranks: Pool, name: str, transport: str) -> None:
    ranks.run(3 if name == "1F1B" else 2, tied, name, transport)


def sends_all_first(me: Rank, lane: int, transport: str, folder: str) -> None:
    """Rank 1 receives no message of a step before rank 0 has sent all of them."""
    told = Path(folder, "all sent")

    def ordered(plan: Plan, table: Table) -> Table:
        left = [step for step in plan.steps if step.kind == "SEND_F"]

        def send(step: Step) -> None:
            table["SEND_F"](step)
            left.remove(step)
            if not left:
                told.touch()

        def receive(step: Step) -> None:
            deadline = time.monotonic() + 20
            while not told.exists():
                assert time.monotonic() < deadline, "the sender must not wait for its receiver"
                time.sleep(0.001)
            table["RECV_F"](step)

        return {**table, "SEND_F": send} if me.rank == 0 else {**table, "RECV_F": receive}

    with symm_overlap.lane(lane):
        runtime = runtime_of(me, "GPipe", 8, [Layer(0), Layer(1)], loss=squared, transport=transport)
        x, target = batch(8)
        for _ in range(4):
            dist.barrier(me.group)
            told.unlink(missing_ok=True)
            dist.barrier(me.group)
            with transformed(ordered):
                runtime.step(x, target=target)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_late_receiver_never_holds_up_its_sender(
    ranks: Pool, fresh_lane: Callable[[], int], transport: str, tmp_path: Path
) -> None:
    ranks.run(2, sends_all_first, fresh_lane(), transport, str(tmp_path))
