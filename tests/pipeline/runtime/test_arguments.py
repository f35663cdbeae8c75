"""Wrong arguments of a runtime or of a step raise errors that name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec

import symm_overlap
from symm_overlap.pipeline import read_csv, torch_schedule, verify
from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.runtime import PipelineRuntime, Stage
from tests.pipeline.runtime.models import Layer, batch, squared
from tests.ranks import Pool, Rank

FORWARDS = "0F0,0F1\n"


def runtime(me: Rank, stages: Any = None, schedule: Any = "GPipe", **options: Any) -> PipelineRuntime:
    found = Stage(Layer(0), 0) if stages is None else stages
    return PipelineRuntime(found, schedule, group=me.group, **({"loss": squared} | options))


def step(me: Rank, *args: Tensor, target: Tensor | None = None, options: Any = None, **kwargs: Tensor) -> None:
    runtime(me, microbatches=4, **(options or {})).step(*args, target=target, **kwargs)


def stage_of_torch(me: Rank) -> PipelineStage:
    return PipelineStage(Layer(0), 0, 1, me.device, group=me.group)


X, TARGET = batch(4)
NUMBER = torch.tensor(2.0)

WRONG: dict[str, tuple[Callable[[Rank], Any], type[Exception], str]] = {
    "no microbatches": (
        lambda me: runtime(me, microbatches=0),
        ValueError,
        "microbatches must be at least 1, not 0",
    ),
    "a loss without a target": (
        lambda me: step(me, X),
        TypeError,
        "the loss failed, perhaps because the step got no target=: unsupported operand",
    ),
    "a truth value": (
        lambda me: runtime(me, microbatches=False),
        TypeError,
        "microbatches must be an integer, not False",
    ),
    "a module": (
        lambda me: runtime(me, [Layer(0)]),
        TypeError,
        r"a stage is a Layer: wrap the module in Stage\(module, index\)",
    ),
    "no schedule": (
        lambda me: runtime(me, schedule=0),
        TypeError,
        "schedule is a int: it must be a Schedule, or the name of a generator",
    ),
    "a stage that is tied to none": (
        lambda me: runtime(me, tied=[[(0, "linear.weight"), (7, "linear.weight")]]),
        ValueError,
        "tied parameters name stage 7, and there are stages 0 to 0",
    ),
    "an argument without rows": (
        lambda me: step(me, NUMBER, target=TARGET),
        ValueError,
        r"the arguments of this step cannot be cut .* shape \(\) has no rows. Give a number",
    ),
    "a keyword argument without rows": (
        lambda me: step(me, X, target=TARGET, scale=NUMBER),
        ValueError,
        r"the keyword arguments of this step cannot be cut",
    ),
    "a target without rows": (
        lambda me: step(me, X, target=NUMBER),
        ValueError,
        "the target of this step cannot be cut",
    ),
    "an empty batch": (
        lambda me: step(me, X[:0], target=TARGET[:0]),
        ValueError,
        r"a tensor of shape \(0, 6\) has no rows$",
    ),
    "a dimension that does not exist": (
        lambda me: step(me, X, target=TARGET, options={"chunk_args": (TensorChunkSpec(9),)}),
        ValueError,
        "a batch cannot be cut into 4 microbatches: Dimension out of range",
    ),
    "a complex loss": (
        lambda me: step(me, X, target=TARGET, options={"loss": lambda out, target: squared(out, target) * 1j}),
        TypeError,
        r"the loss of microbatch 0 is a complex tensor of shape \(\): it must be a tensor of one real number",
    ),
    "torch's runtime, forwards alone": (
        lambda me: torch_schedule(read_csv(FORWARDS), stage_of_torch(me)),
        ValueError,
        "the schedule has no backwards, .* use PipelineRuntime",
    ),
    "torch's runtime, a name": (
        lambda me: torch_schedule("1F1B", stage_of_torch(me)),  # type: ignore[arg-type]
        TypeError,
        "schedule is a str: call .*generate",
    ),
    "torch's runtime, our stage": (
        lambda me: torch_schedule(generate("GPipe", 1, 2), Stage(Layer(0), 0)),  # type: ignore[arg-type]
        TypeError,
        "a stage is a Stage: give torch's PipelineStage",
    ),
}


def is_told(me: Rank, what: str) -> None:
    call, error, text = WRONG[what]
    with pytest.raises(error, match=text):
        call(me)


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_told(ranks: Pool, what: str) -> None:
    ranks.run(1, is_told, what)


def takes_any_iterable(me: Rank) -> None:
    for stages in (stage_of_torch(me), (stage_of_torch(me) for _ in range(1)), {0: stage_of_torch(me)}.values()):
        torch_schedule(generate("GPipe", 1, 2), stages, squared)  # type: ignore[arg-type]


def test_stages_of_torch_come_in_any_iterable(ranks: Pool) -> None:
    ranks.run(1, takes_any_iterable)


def runs_forwards(me: Rank) -> None:
    layer, schedule = Layer(0), read_csv(FORWARDS)
    verify(schedule).raise_for_problems()
    found = runtime(me, Stage(layer, 0), schedule, loss=None, tied=[[]]).step(X)
    torch.testing.assert_close(found, layer(X).detach())


def test_forwards_alone_run(ranks: Pool) -> None:
    ranks.run(1, runs_forwards)


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to_sparse()


def sends_sparse(me: Rank) -> None:
    module = Sparse() if me.rank == 0 else Layer(1)
    made = runtime(me, Stage(module, me.rank), "1F1B", microbatches=4, device="cpu")
    error, text = (TypeError, "layout torch.sparse_coo, which cannot be sent") if me.rank == 0 else (RuntimeError, "0")
    with pytest.raises(error, match=text):
        made.step(X, target=TARGET)


def test_a_sparse_tensor_is_not_sent(ranks: Pool) -> None:
    ranks.run(2, sends_sparse)


def prepared(me: Rank) -> None:
    made = runtime(me, microbatches=2)
    with symm_overlap.prepare(), pytest.raises(RuntimeError, match="cannot run inside symm_overlap"):
        made.step(X, target=TARGET)
    made.step(X, target=TARGET)


def test_a_step_is_not_prepared(ranks: Pool) -> None:
    ranks.run(1, prepared)
