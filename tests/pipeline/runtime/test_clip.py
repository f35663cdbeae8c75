"""Gradients of all ranks are clipped by one norm: that of the whole model, in which tied parameters count once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from symm_overlap.pipeline.runtime import clip
from tests.pipeline.runtime.models import Layer, assert_gradients, batch, gradients, reference, squared
from tests.pipeline.runtime.test_contract import runtime_of
from tests.pipeline.runtime.test_tied import Used
from tests.ranks import Pool, Rank


def as_the_whole(me: Rank, name: str, stages: int, tied: list[list[tuple[int, str]]]) -> None:
    whole, mine = ([Used(stage) for stage in range(stages)] for _ in range(2))
    for parts in (whole, mine):
        for stage, name_in_stage in (copy for copies in tied for copy in copies):
            nn.init.ones_(parts[stage].get_parameter(name_in_stage))
    for copies in tied:
        for stage, _ in copies[1:]:
            whole[stage].spare = whole[copies[0][0]].spare
    runtime = runtime_of(me, name, 4, list(mine), loss=squared, tied=tied)
    x, target = batch(4)
    for norm_type in (2.0, 1.0, 3, "inf"):
        nn.ModuleList(whole).zero_grad()
        nn.ModuleList(mine).zero_grad()
        reference(whole, x, target, 4)
        runtime.step(x, target=target)
        for max_norm in (1e9, 0.5, 0.01):
            expected = nn.utils.clip_grad_norm_(nn.ModuleList(whole).parameters(), max_norm, norm_type)
            found = runtime.clip_grad_norm_(max_norm, norm_type)
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=0.0)
            for stage in runtime.schedule.stages_of_ranks[me.rank]:
                wanted = gradients(nn.ModuleDict({"a": whole[stage]}))
                assert_gradients(gradients(nn.ModuleDict({"a": mine[stage]})), wanted)


@pytest.mark.parametrize(
    ("world", "name", "stages", "tied"),
    [
        (1, "Interleaved1F1B", 2, [[(0, "spare"), (1, "spare")]]),
        (2, "1F1B", 2, []),
        (2, "ZBV", 4, [[(3, "spare"), (0, "spare")], [(1, "spare"), (2, "spare")]]),
        (3, "Interleaved1F1B", 6, [[(0, "spare"), (2, "spare"), (5, "spare")]]),
    ],
)
def test_gradients_are_clipped_as_those_of_the_whole_model(
    ranks: Pool, world: int, name: str, stages: int, tied: list[list[tuple[int, str]]]
) -> None:
    ranks.run(world, as_the_whole, name, stages, tied)


def with_replicas(me: Rank) -> None:
    """Each of the two pipelines has all layers, and their copies count once."""
    schedule = [Layer(stage % 2) for stage in range(4)]
    runtime = runtime_of(me, "DualPipe", 4, list(schedule), loss=squared)
    x, target = batch(4)
    runtime.step(x, target=target)
    whole = nn.ModuleList([Layer(stage) for stage in range(2)])
    reference(list(whole), x, target, 4)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
    torch.testing.assert_close(runtime.clip_grad_norm_(0.01), expected, rtol=1e-11, atol=0.0)
    for stage in runtime.schedule.stages_of_ranks[me.rank]:
        assert_gradients(gradients(schedule[stage]), gradients(whole[stage % 2]))


def test_replicas_of_a_stage_count_once(ranks: Pool) -> None:
    ranks.run(2, with_replicas)


def not_finite(me: Rank) -> list[str]:
    mine = [Layer(stage) for stage in range(2)]
    runtime = runtime_of(me, "1F1B", 4, list(mine), loss=squared)
    assert runtime.clip_grad_norm_(1.0).tolist() == 0.0, "no gradients have the norm 0"
    x, target = batch(4)
    runtime.step(x, target=target)
    said = []
    for value, norm_type in ((float("nan"), 2.0), (float("nan"), "inf"), (float("inf"), 2.0)):
        if me.rank == 1:
            next(mine[1].parameters()).grad[0] = value  # type: ignore[index]
        before = gradients(mine[me.rank])
        with pytest.raises(RuntimeError, match="the norm of the gradients of all ranks is") as error:
            runtime.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
        torch.testing.assert_close(gradients(mine[me.rank]), before, rtol=0, atol=0, equal_nan=True)
        said.append(str(error.value).split(" is ")[1].split(",")[0])
    for bad in (0.0, -1):
        with pytest.raises(ValueError, match="norm_type is"):
            runtime.clip_grad_norm_(1.0, bad)
    return said


def test_a_norm_that_is_not_finite_is_an_error_on_every_rank(ranks: Pool) -> None:
    assert ranks.run(2, not_finite) == [["nan", "nan", "inf"]] * 2


def without_a_norm(me: Rank, failing: int) -> str:
    """Torch fails on one rank, as for sparse gradients before torch 2.14."""
    mine = [Layer(stage) for stage in range(2)]
    runtime = runtime_of(me, "1F1B", 4, list(mine), loss=squared)
    x, target = batch(4)
    runtime.step(x, target=target)
    before = gradients(mine[me.rank])
    fails = mock.patch.object(clip, "get_total_norm", side_effect=NotImplementedError("no such norm"))
    raises = pytest.raises((NotImplementedError, RuntimeError))
    with fails if me.rank == failing else nullcontext(), raises as error:
        runtime.clip_grad_norm_(0.01)
    assert_gradients(gradients(mine[me.rank]), before)
    return str(error.value)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_compute_its_norm_tells_the_others(ranks: Pool, failing: int) -> None:
    said = ranks.run(2, without_a_norm, failing)
    assert said[failing] == "no such norm"
    assert said[1 - failing] == f"clip_grad_norm_: no gradient was clipped, because it failed on rank {failing}"


def before_a_step(me: Rank) -> Any:
    from symm_overlap.pipeline.model import PipelineModel

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    pipe = PipelineModel(model, num_microbatches=2, loss=squared, group=me.group)
    with pytest.raises(RuntimeError, match="call run_train first"):
        pipe.clip_grad_norm_(1.0)


def test_a_model_has_no_gradients_before_its_first_step(ranks: Pool) -> None:
    ranks.run(2, before_a_step)
