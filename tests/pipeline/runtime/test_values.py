"""Values of every kind can be sent, and random schedules compute the same as the stages run one after the other."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import symm_overlap
from symm_overlap.pipeline.runtime import PipelineRuntime, Stage
from symm_overlap.plan import Plan, Table
from symm_overlap.plan.testing import delayed
from symm_overlap.settings import transformed
from tests.pipeline.random_schedules import random_compute
from tests.pipeline.runtime.models import Layer, assert_gradients, batch, gradients, reference, squared
from tests.pipeline.runtime.test_contract import TRANSPORTS, runtime_of
from tests.quick import one_in
from tests.ranks import Pool, Rank

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "conjugated": lambda x: torch.view_as_complex(x.view(len(x), -1, 2)).conj(),
    "negated": lambda x: torch.view_as_complex(x.view(len(x), -1, 2)).conj().imag,
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x.sum(1, keepdim=True).expand(len(x), 4),
    "two": lambda x: (x * 1, x * 3),
    "no rows": lambda x: (x, x[:0]),
    "one element": lambda x: x.sum(),
    "bool": lambda x: (x, x > 0),
    "bfloat16": lambda x: x.bfloat16(),
    "float8": lambda x: (x, x.detach().to(torch.float8_e4m3fn)),
}


class Shows(nn.Module):
    """Passes on a view of its layer's result."""

    def __init__(self, view: str) -> None:
        super().__init__()
        self.layer, self.view = Layer(0), view

    def forward(self, x: Tensor) -> Any:
        return VIEWS[self.view](self.layer(x))


class Reads(nn.Module):
    """Computes one number from its arguments. If another argument has the shape and dtype of the first, it changes the
    first one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        sums = [(each * each).sum() if each.dtype == torch.float64 else each.float().sum() for each in others]
        if any(each.shape == x.shape and each.dtype == x.dtype for each in others):
            x.mul_(2)  # so far, autograd has saved only the others
        value = (x * x.conj()).real if x.is_complex() else x.square()
        return (value.double().sum() * self.scale + sum(sums)).reshape(1)


class ReadsFirst(Reads):
    """Uses only its first argument. The sender's graph expects gradients of the others too."""

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return super().forward(x)


def travels(me: Rank, view: str, transport: str, reads: type[Reads] = Reads) -> None:
    whole, mine = ([Shows(view), reads()] for _ in range(2))

    def loss(result: Tensor, target: Tensor) -> Tensor:
        return (result * target.mean()).sum()

    runtime = runtime_of(me, "1F1B", 4, list(mine), loss=loss, transport=transport)
    for step in range(3):
        x, target = batch(4, step)
        wanted = reference(whole, x, target, 4, loss)[2]
        runtime.step(x, target=target)
        assert_gradients(gradients(mine[me.rank]), wanted[me.rank])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("view", VIEWS)
def test_values_arrive_as_they_are(ranks: Pool, view: str, transport: str) -> None:
    ranks.run(2, travels, view, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stage_may_leave_values_unused(ranks: Pool, transport: str) -> None:
    ranks.run(2, travels, "two", transport, ReadsFirst)


class Dictionary(nn.Module):
    """A first stage whose argument is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(0)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.layer(given["x"]) * given["y"]
        return out


def nested(me: Rank) -> None:
    mine: list[nn.Module] = [Dictionary(), Layer(1)]
    runtime = runtime_of(me, "ZB-H1", 2, mine, loss=squared)
    x, target = batch(2)
    y = torch.ones_like(x).requires_grad_()
    for _ in range(2):
        runtime.step({"x": x, "y": y}, target=target)
    assert (y.grad is not None) == (me.rank == 0)
    assert all(each.grad is not None for each in mine[me.rank].parameters())


def test_arguments_may_be_nested(ranks: Pool) -> None:
    ranks.run(2, nested)


def two_lanes(me: Rank) -> None:
    failures: list[BaseException] = []

    def train(lane: int, name: str, microbatches: int) -> None:
        try:
            with symm_overlap.lane(lane):
                whole, mine = ([Layer(stage) for stage in range(me.world)] for _ in range(2))
                runtime = runtime_of(me, name, microbatches, list(mine), loss=squared)
                for step in range(4):
                    x, target = batch(microbatches, step)
                    wanted = reference(whole, x, target, microbatches)[2]
                    runtime.step(x, target=target)
                    assert_gradients(gradients(mine[me.rank]), wanted[me.rank])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=args) for args in ((11, "1F1B", 4), (12, "GPipe", 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_pipelines_on_two_lanes_train_at_the_same_time(ranks: Pool) -> None:
    ranks.run(2, two_lanes)


def random_schedule(me: Rank, seed: int) -> None:
    source = random.Random(seed)
    schedule = random_compute(seed, compounds=seed % 2 == 0)
    count = schedule.microbatches
    whole, mine = ([Layer(stage) for stage in range(schedule.stages)] for _ in range(2))
    with symm_overlap.timeout(30):
        runtime = PipelineRuntime(
            [Stage(mine[stage], stage) for stage in schedule.stages_of_ranks[me.rank]],
            schedule,
            group=me.group,
            loss=squared,
            transport=source.choice([None, None, "c10d"]),
        )

        def late(plan: Plan, table: Table) -> Table:
            return delayed(table, seed, me.rank, 1e-3)

        for step in range(3):
            x, target = batch(count, step)
            wanted = reference(whole, x, target, count)[2]
            with transformed(late):
                runtime.step(x, target=target)
            for stage in schedule.stages_of_ranks[me.rank]:
                assert_gradients(gradients(mine[stage]), wanted[stage])


def has_backwards(seed: int) -> bool:
    return any(action and action.kind != "F" for row in random_compute(seed).rows for action in row)


@pytest.mark.parametrize("seed", one_in(3, [seed for seed in range(24) if has_backwards(seed)]))
def test_random_schedules_train_like_the_model_in_one_piece(ranks: Pool, seed: int) -> None:
    ranks.run(random_compute(seed).ranks, random_schedule, seed)
