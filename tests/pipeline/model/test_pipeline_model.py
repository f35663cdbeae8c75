"""The interface of `PipelineModel`: what it accepts, what it returns on each rank, and what it rejects."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.model import PipelineModel
from tests.pipeline.model.models import BATCH, LENGTH, WIDTH, inputs_of, make, mean_square, microbatches, reals
from tests.pipeline.model.reference import EXACT, same_gradients, whole_step
from tests.ranks import Pool, Rank


def pipelined(me: Rank, name: str, **more: Any) -> tuple[PipelineModel, nn.Module, dict[str, Any], dict[str, Any]]:
    model, batch, options = make(name, 4)
    whole = copy.deepcopy(model)
    given = {"num_microbatches": 4, "group": me.group, **options, **more}
    return PipelineModel(model, **given), whole, batch, options


def losses(me: Rank) -> list[Tensor | None]:
    pipe, whole, batch, options = pipelined(me, "unet")
    everywhere, _, _, _ = pipelined(me, "unet", loss_on_all_ranks=True)
    found = [pipe.run_train(**batch), everywhere.run_train(**batch)]
    return [*found, whole_step(whole, batch, options, 4)]


def test_the_loss_is_on_the_rank_of_the_last_stage_or_on_all(ranks: Pool) -> None:
    (none, first, expected), (last, second, _) = ranks.run(2, losses)
    assert none is None
    for found in (first, last, second):
        torch.testing.assert_close(found, expected, **EXACT)


def loss_in_bfloat16(me: Rank) -> Tensor | None:
    model, batch, options = make("mlp", 4)
    given = {"num_microbatches": 4, "group": me.group, "loss_on_all_ranks": True, **options}
    halves = {name: each.bfloat16() for name, each in batch.items()}
    return PipelineModel(model.bfloat16(), **given).run_train(**halves)


def test_the_loss_has_its_dtype_on_all_ranks(ranks: Pool) -> None:
    one, other = ranks.run(2, loss_in_bfloat16)
    assert one.dtype == torch.bfloat16
    assert torch.equal(one, other)


def evaluated(me: Rank) -> list[Any]:
    pipe, whole, batch, options = pipelined(me, "mlp")
    found = [pipe.run_eval(**batch), pipe.run_eval(**inputs_of(batch, options))]
    with torch.no_grad():
        return [*found, mean_square(whole(batch["x"]), batch["target"]), whole(batch["x"])]


def test_forwards_alone_return_the_loss_where_there_is_a_target_and_outputs_otherwise(ranks: Pool) -> None:
    (*nothing, _, _), (loss, outputs, expected_loss, expected) = ranks.run(2, evaluated)
    assert nothing == [None, None]
    torch.testing.assert_close(loss, expected_loss, **EXACT)
    torch.testing.assert_close(outputs, expected, **EXACT)


def changing_shapes(me: Rank) -> None:
    pipe, whole, batch, options = pipelined(me, "gpt2")
    for rows, length in [(8, 6), (8, 3), (5, 6), (8, 6)]:
        part = {name: value[:rows, :length] for name, value in batch.items()}
        loss, expected = pipe.run_train(**part), whole_step(whole, part, options, 4)
        if loss is not None:
            torch.testing.assert_close(loss, expected, **EXACT)
        same_gradients(pipe, whole)


def test_batches_may_change_their_shapes(ranks: Pool) -> None:
    ranks.run(2, changing_shapes, timeout=120)


class Mixed(nn.Module):
    """A model with dropout between layers, and with inputs that are cut along another dimension or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, table: Tensor, scale: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        for layer in self.layers:
            y = layer(y) * scale + table
            if self.training:
                y = self.dropout(y)
        return y


def mixed(me: Rank) -> list[Any]:
    torch.manual_seed(0)
    model = Mixed().double()
    whole = copy.deepcopy(model).eval()
    batch = {
        "x": reals(LENGTH, BATCH, WIDTH),
        "table": reals(LENGTH, WIDTH, seed=1),
        "scale": torch.tensor(2.0, dtype=torch.float64),
    }
    dims = {"x": 1, "table": None}
    pipe = PipelineModel(model, num_microbatches=4, loss=mean_square, batch_dims=dims, group=me.group)
    found = pipe.eval().run_eval(**batch)
    dropped = pipe.train().run_eval(**batch)
    again = pipe.eval().run_eval(**batch)
    return [found, again, dropped, whole(**batch).detach()]


def test_entries_are_cut_along_any_dimension_or_not_and_modes_change(ranks: Pool) -> None:
    _, (found, again, dropped, expected) = ranks.run(2, mixed)
    torch.testing.assert_close(found, expected, **EXACT)
    torch.testing.assert_close(again, expected, **EXACT)
    assert 0.4 < (dropped == 0).double().mean() < 0.6


def under_autocast(me: Rank) -> list[Any]:
    model, batch, options = make("mlp", 4)
    model, batch["x"] = model.float(), batch["x"].float()  # autocast does not change float64
    whole = copy.deepcopy(model)
    pipe = PipelineModel(model, num_microbatches=4, group=me.group, **options)
    found = []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(pipe.run_eval(**inputs_of(batch, options)))
            each = [whole(**inputs_of(part, options)).detach() for part in microbatches(batch, 4)]
            found.append(torch.cat(each))
    return found


def test_autocast_acts_as_on_the_whole_model(ranks: Pool) -> None:
    _, (cast, whole_cast, plain, whole_plain) = ranks.run(2, under_autocast)
    torch.testing.assert_close(cast, whole_cast, rtol=0, atol=0)
    torch.testing.assert_close(plain, whole_plain, rtol=0, atol=0)
    assert cast.dtype == torch.bfloat16
    assert plain.dtype == torch.float32


def optimized(me: Rank, each_stage: bool) -> None:
    pipe, whole, batch, options = pipelined(me, "shared", schedule=generate("ZBVZeroBubble", 2, 4))
    pipe.build(**batch)
    parts = [stage.module for stage in pipe.stages] if each_stage else [pipe]
    mine = [torch.optim.Adam(part.parameters(), 0.1) for part in parts]
    theirs = torch.optim.Adam(whole.parameters(), 0.1)
    for _ in range(4):
        loss, expected = pipe.run_train(**batch), whole_step(whole, batch, options, 4)
        if loss is not None:
            torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
        for optimizer in (*mine, theirs):
            optimizer.step()
        for optimizer in (*mine, theirs):
            optimizer.zero_grad()
    other, _, _, _ = pipelined(me, "shared")
    other.build(**batch).load_state_dict(whole.state_dict())
    names = sorted(name for name in other.state_dict() if name.endswith(".bias"))
    assert names == [f"layers.{layer}.bias" for layer in range(4)], "a tied parameter has all of its names"
    found, expected = other.run_eval(**batch), pipe.run_eval(**batch)
    if found is not None and expected is not None:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({})
    for stages in (pipe.stages, copy.deepcopy(pipe.stages)):
        every = [parameter for stage in stages for parameter in stage.module.parameters()]
        assert len({id(parameter) for parameter in every}) == len(every)


@pytest.mark.parametrize("each_stage", [False, True], ids=["one", "one a stage"])
def test_optimizers_keep_tied_parameters_equal_and_state_dicts_go_between_cuts(ranks: Pool, each_stage: bool) -> None:
    ranks.run(2, optimized, each_stage, timeout=120)


def refused(me: Rank) -> None:
    pipe, _, batch, options = pipelined(me, "mlp")
    with pytest.raises(RuntimeError, match=r"call build\(\*\*batch\)"):
        next(pipe.parameters())
    inputs = inputs_of(batch, options)
    for given, error, message in [
        (inputs, ValueError, "the batch has no 'target', the target of the loss: it has x"),
        ({**batch, "x": batch["x"][:3]}, ValueError, r"cannot be cut along dimension 0 into 4 microbatches"),
        ({**batch, "x": object()}, TypeError, r"\['x'\] of the batch is a object"),
        ({"target": 1, "x": 2}, ValueError, "no tensor that could be cut"),
    ]:
        with pytest.raises(error, match=message):
            pipe.run_train(**given)
    without, _, _, _ = pipelined(me, "mlp", loss=None)
    with pytest.raises(ValueError, match=r"returns a tensor of shape \(2, 3\) without a loss: give loss="):
        without.run_train(**inputs)
    own, _, _, _ = pipelined(me, "mlp", loss=lambda result: result.square().mean(), target=None)
    assert (own.run_train(**inputs) is None) == (me.rank != own.schedule.rank_of(own.schedule.stages - 1))
    for more, message in [
        ({"first": "embed"}, "are for trace=False"),
        ({"schedule": "DualPipe"}, "use DualPipeV"),
        ({"schedule": generate("1F1B", 2, 3)}, "for 2 ranks and 3 microbatches, but there are 2 and 4"),
        ({"trace": False, "first": "nothing"}, "no module 'nothing', which first or last names"),
        ({"trace": False, "kwargs_of": {"nothing": "x"}}, "kwargs_of names 'nothing', which is not one of blocks.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            pipelined(me, "mlp", **more)


def test_what_cannot_be_is_refused_on_every_rank_before_anything_is_sent(ranks: Pool) -> None:
    ranks.run(2, refused)


class Gated(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor, power: int = 1) -> Tensor:
        return x + (super().forward(x) * mask if bool(mask.any()) else x) ** power


def by_keyword(me: Rank) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"embed": nn.Linear(4, WIDTH), "layers": nn.ModuleList(Gated(WIDTH, WIDTH) for _ in range(3))}
    )
    model = model.double()
    whole = copy.deepcopy(model)
    options = {
        "trace": False,
        "layer_names": "layers.*",
        "first": "embed",
        "kwargs_of": {"layers.*": ("mask", "power")},
    }
    pipe = PipelineModel(model, num_microbatches=2, loss=mean_square, group=me.group, **options)
    batch = {"x": reals(4, 4), "mask": reals(4, WIDTH, seed=1), "power": 2, "target": reals(4, WIDTH, seed=2)}
    pipe.run_train(**batch)
    for part in microbatches(batch, 2):
        x = whole["embed"](part["x"])
        for layer in whole["layers"]:
            x = layer(x, mask=part["mask"], power=2)
        (mean_square(x, part["target"]) / 2).backward()
    same_gradients(pipe, whole)


def test_without_tracing_layers_get_entries_of_the_batch_by_keyword(ranks: Pool) -> None:
    ranks.run(2, by_keyword)


def copied(me: Rank) -> None:
    model, batch, options = make("mlp", 2)
    pipe = PipelineModel(model, num_microbatches=2, group=me.group, **options).build(**batch)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled, .*: make a second one"):
            attempt(pipe)
    second = PipelineModel(make("mlp", 2)[0], num_microbatches=2, group=me.group, **options).build(**batch)
    for parameter in second.parameters():
        nn.init.zeros_(parameter)
    second.load_state_dict(pipe.state_dict())
    for (name, mine), (other, first) in zip(second.named_parameters(), pipe.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(mine, first, rtol=0, atol=0)


def test_a_copy_is_a_second_pipeline(ranks: Pool) -> None:
    ranks.run(2, copied)
