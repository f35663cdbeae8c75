"""One rank does something else than its peers. All of them get an error, and none pairs a batch with another one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import symm_overlap
from symm_overlap.pipeline.model import PipelineModel
from symm_overlap.pipeline.model.batch import Batch
from tests.ranks import Pool, Rank

TRANSPORTS = ["symmetric", "c10d"]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def batch(number: int, rows: int = 8) -> dict[str, Tensor]:
    torch.manual_seed(number)
    return {"input": torch.randn(rows, 8), "target": torch.randn(rows, 8)}


def piped(me: Rank, **options: Any) -> PipelineModel:
    options = {"partition": "even", **options}
    return PipelineModel(
        layers(), layer_names="*", num_microbatches=4, loss=nn.functional.mse_loss, group=me.group, **options
    )


def trains(model: PipelineModel, number: int) -> None:
    """Run a step, and check its loss."""
    given = batch(number)
    loss = model.run_train(**given)
    if loss is not None:
        whole = nn.functional.mse_loss(layers()(given["input"]), given["target"])
        torch.testing.assert_close(loss, whole)


def without_target(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"input": given["input"]}


def too_small(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor[:2] for name, tensor in given.items()}


def rejects(me: Rank, transport: str, how: str, lanes: tuple[int, int]) -> None:
    """Rank 0 rejects its third batch, and goes on. Rank 1 still has the third one, when rank 0 has the fourth."""
    with symm_overlap.lane(lanes[0]), symm_overlap.timeout(20):
        model = piped(me, transport=transport)
        trains(model, 0)
        trains(model, 1)
        if me.rank == 0:
            given = {"no target": without_target, "too small": too_small}.get(how, dict)(batch(2))
            interrupt = mock.patch.object(Batch, "of", side_effect=KeyboardInterrupt)
            with pytest.raises((ValueError, KeyboardInterrupt)), interrupt if how == "interrupt" else nullcontext():
                model.run_train(**given)
        with pytest.raises(dist.DistBackendError, match=r"is in a different call|is in its step"):
            trains(model, 3 if me.rank == 0 else 2)
    with symm_overlap.lane(lanes[1]):
        trains(piped(me, transport=transport), 5)


@pytest.mark.parametrize("how", ["no target", "too small", "interrupt"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_batch_that_one_rank_rejects_is_not_paired_with_its_next_one(
    ranks: Pool, fresh_lane: Any, transport: str, how: str
) -> None:
    ranks.run(2, rejects, transport, how, (fresh_lane(), fresh_lane()))


def all_reject(me: Rank, transport: str, lane: int) -> None:
    with symm_overlap.lane(lane):
        model = piped(me, transport=transport)
        for number in range(4):
            with pytest.raises(ValueError, match="the batch has no 'target'"):
                model.run_train(**without_target(batch(number)))
            trains(model, number)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_batch_that_all_ranks_reject_changes_nothing(ranks: Pool, fresh_lane: Any, transport: str) -> None:
    ranks.run(2, all_reject, transport, fresh_lane())


def other_rows(me: Rank, lanes: tuple[int, int]) -> None:
    with symm_overlap.lane(lanes[0]), symm_overlap.timeout(20):
        model = piped(me)
        trains(model, 0)
        trains(model, 1)
        with pytest.raises(dist.DistBackendError, match=r"is in a different call|its lane broke"):
            model.run_train(**batch(2, 16 if me.rank == 0 else 8))
    with symm_overlap.lane(lanes[1]):
        trains(piped(me), 3)


def test_ranks_with_batches_of_other_sizes_get_an_error_at_once(ranks: Pool, fresh_lane: Any) -> None:
    ranks.run(2, other_rows, (fresh_lane(), fresh_lane()))


def other_first_rows(me: Rank, transport: str, earlier_steps: int, lane: int) -> None:
    with symm_overlap.lane(lane):
        model = piped(me, transport=transport)
        for number in range(earlier_steps):
            trains(model, number)
        with pytest.raises(ValueError, match=r"(?s)differ in their batch.*shape \(16, 8\), torch.float32"):
            model.run_train(**batch(0, 16 if me.rank == 0 else 8))
        for number in range(3):
            trains(model, number)


@pytest.mark.parametrize(("transport", "earlier_steps"), [*((each, 0) for each in TRANSPORTS), ("symmetric", 1)])
def test_batches_that_differ_before_a_lane_has_memory_are_named_and_the_next_step_runs(
    ranks: Pool, fresh_lane: Any, transport: str, earlier_steps: int
) -> None:
    ranks.run(2, other_first_rows, transport, earlier_steps, fresh_lane())


def other_mode(me: Rank, lane: int) -> None:
    with symm_overlap.lane(lane):
        model = piped(me).train(me.rank == 0)
        with pytest.raises(ValueError, match=r"(?s)differ in their batch.*in evaluation mode"):
            model.run_train(**batch(0))
        trains(model.train(), 0)


def test_ranks_in_training_and_evaluation_mode_are_told(ranks: Pool, fresh_lane: Any) -> None:
    ranks.run(2, other_mode, fresh_lane())


def other_parts(me: Rank) -> None:
    model = piped(me, partition=[3, 1] if me.rank == 0 else [2, 2])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"numbers of layers of the stages: \[3, 1\], and \[2, 2\]"):
            model.run_train(**batch(0))


def test_parts_that_do_not_make_up_the_model_are_an_error(ranks: Pool) -> None:
    ranks.run(2, other_parts)


def cannot_begin(me: Rank) -> None:
    """Rank 1 rejects its first batch. The ranks then make their parts in the next step."""
    model = piped(me)
    if me.rank == 1:
        with pytest.raises(ValueError, match="the batch has no 'target'"):
            model.run_train(**without_target(batch(0)))
    else:
        with pytest.raises(RuntimeError, match=r"rank 1 of the pipeline could not make its part.* no 'target'"):
            model.run_train(**batch(0))
    trains(model, 1)


def test_a_rank_that_rejects_its_first_batch_is_named(ranks: Pool) -> None:
    ranks.run(2, cannot_begin)


def clips(me: Rank) -> None:
    model = piped(me)
    trains(model, 0)
    error, text = (ValueError, "above 0") if me.rank else (RuntimeError, "failed on rank 1")
    with pytest.raises(error, match=text):
        model.clip_grad_norm_(1.0, -1.0 if me.rank else 2.0)
    model.clip_grad_norm_(1.0)


def test_a_wrong_norm_on_one_rank_is_told_to_all(ranks: Pool) -> None:
    ranks.run(2, clips)


def clips_alone(me: Rank) -> None:
    with symm_overlap.timeout(2):
        model = piped(me, loss_on_all_ranks=True)
        model.run_train(**batch(0))
        if me.rank == 0:
            with pytest.raises(dist.DistBackendError, match=r"clip_grad_norm_: a rank .* did not come within 2 s"):
                model.clip_grad_norm_(1.0)
    if me.rank == 1:
        time.sleep(4)  # is alive until then


def test_a_collective_that_one_rank_leaves_out_ends_at_the_deadline(fresh_ranks: Callable[[int], Pool]) -> None:
    fresh_ranks(2).run(2, clips_alone)
