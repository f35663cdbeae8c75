"""Ranks that share the windows of a step train the same model as one process, with every way to share the model."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from symm_overlap.demo.config import TrainConfig
from symm_overlap.demo.data_parallel import Ddp
from symm_overlap.demo.forms import Form, forms_of, unsplit
from symm_overlap.demo.linears import Attention
from symm_overlap.demo.model import LanguageModel
from symm_overlap.demo.sample import generate
from symm_overlap.demo.trainer import Trainer
from symm_overlap.demo.training import _trainer, train_as
from tests.demo.models import CONFIG, alone, here, windows
from tests.demo.test_model import SPLIT
from tests.ranks import Pool, Rank

SHARED = dataclasses.replace(CONFIG, fsdp=4, tp=1, batch=4, compare=True)


def trainers(config: TrainConfig) -> list[Trainer]:
    place = here(config.pp, config.fsdp)
    return [_trainer(config, form, place) for form in forms_of(config, place)]


def reference(config: TrainConfig, steps: int) -> tuple[list[float], str]:
    trainer, batches = alone(config), windows(config)
    return [trainer.step(batches.next()) for _ in range(steps)], generate(trainer, "The ", 4, config.seq, 5)


def losses_and_text(me: Rank, config: TrainConfig, steps: int) -> dict[str, tuple[list[float], str]]:
    found = {}
    for trainer in trainers(config):
        batches = windows(config)
        losses = [trainer.step(batches.next()) for _ in range(steps)]
        found[trainer.name] = losses, generate(trainer, "The ", 4, config.seq, 5)
    return found


@pytest.mark.parametrize(
    "change",
    [
        {"fsdp": 4},
        {"fsdp": 2, "tp": 2},
        pytest.param({"fsdp": 2, "pp": 2, "schedule": "zbv"}, marks=pytest.mark.slow),
    ],
)
def test_every_way_has_the_losses_and_the_text_of_one_process(four: Pool, change: dict[str, int]) -> None:
    config = dataclasses.replace(SHARED, **change)
    losses, text = reference(config, 5)
    assert losses[-1] < losses[0] - 0.3, "the reference does not learn, so equal losses would say little"
    for by_name in four.run(4, losses_and_text, config, 5):
        assert list(by_name) == (WAYS if config.tp == 1 else WAYS[:-1])
        for name, (found, written) in by_name.items():
            assert found == pytest.approx(losses, rel=1e-5), name
            assert written == text, name


WAYS = ["overlap", "ddp", "fsdp2", "linears"]


def gradients(me: Rank, config: TrainConfig) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for trainer in trainers(config):
        trainer.gradients(trainer.share(windows(config).next()))
        found[trainer.name] = {
            name.removeprefix("module."): p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for name, p in trainer.model.named_parameters()
            if p.grad is not None
        }
    return found


@pytest.mark.parametrize(("fsdp", "tp"), [(4, 1), (2, 2)])
def test_every_gradient_is_that_of_one_process(four: Pool, fsdp: int, tp: int) -> None:
    # Losses alone would not show a wrong gradient: Adam hides it if a gradient is off by a factor.
    config = dataclasses.replace(SHARED, fsdp=fsdp, tp=tp)
    trainer = alone(config)
    trainer.gradients(windows(config).next())
    for rank, by_name in enumerate(four.run(4, gradients, config)):
        for way, found in by_name.items():
            assert len(found) == len(list(trainer.model.parameters())), way
            for name, parameter in trainer.model.named_parameters():
                assert parameter.grad is not None
                dim, expected = SPLIT.get(name.rsplit(".", 1)[-1]), parameter.grad
                if dim is not None and tp == 1:  # the weight of an nn.Linear is (out, in)
                    gradient = found[f"{name}.weight"].t()
                else:
                    gradient, expected = found[name], expected if dim is None else expected.chunk(tp, dim)[rank % tp]
                error = (gradient - expected).norm() / expected.norm()
                assert error < 1e-5, f"{way}: {name} on rank {rank}: relative error {error:.1e}"


def bfloat16(me: Rank, config: TrainConfig) -> dict[str, tuple[list[float], set[torch.dtype]]]:
    found = {}
    for trainer in trainers(config):
        dtypes: set[torch.dtype] = set()
        inner = next(module for module in trainer.model.modules() if isinstance(module, Attention))
        inner.register_forward_hook(lambda module, _, __, to=dtypes: to.update(p.dtype for p in module.parameters()))
        batches = windows(config)
        found[trainer.name] = [trainer.step(batches.next()) for _ in range(5)], dtypes
    return found


def test_bfloat16_training_stays_near_float32_and_fsdp_gathers_half_the_bytes(four: Pool) -> None:
    expected, _ = reference(SHARED, 5)
    for by_name in four.run(4, bfloat16, dataclasses.replace(SHARED, dtype="bfloat16")):
        for name, (losses, dtypes) in by_name.items():
            assert losses == pytest.approx(expected, rel=2e-2), name
            assert losses != expected, name
            assert dtypes == {torch.bfloat16 if name in ("overlap", "fsdp2") else torch.float32}, name


class OtherWeights(Ddp):
    """DDP that starts with other weights, so that its losses differ."""

    def wrap(self, model: LanguageModel) -> nn.Module:
        for parameter in model.parameters():
            parameter.data *= 2
        return super().wrap(model)


def compare(me: Rank, config: TrainConfig, wrong: bool) -> tuple[int, str]:
    place = here(config.pp, config.fsdp)
    forms: list[Form] = forms_of(config, place)
    out = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        if wrong:
            assert place.data is not None
            forms.append(unsplit().among(OtherWeights(place.data)))
            unmeasured = mock.Mock(return_value=[None] * len(forms))  # measuring takes time
            stack.enter_context(mock.patch("symm_overlap.demo.training._peaks", unmeasured))
        code = train_as(config, place, forms)
    return code, out.getvalue()


@pytest.mark.slow
def test_compare_shows_losses_times_and_peak_memory_of_every_way(four: Pool) -> None:
    (code, shown), *others = four.run(4, compare, dataclasses.replace(SHARED, steps=2), False)
    assert (code, others) == (0, [(0, "")] * 3)
    assert "on 4 x 1 x cpu, each with a shard of the parameters, in float32" in shown
    peaks = {name: float(peak) for name, peak in re.findall(r"^(\S+): .* peak memory (\S+) MiB a rank$", shown, re.M)}
    assert list(peaks) == WAYS
    # A lower bound: each parameter, its gradient and the two moments of Adam, in float32, as a whole or as a shard.
    whole = 16 * sum(p.numel() for p in alone(SHARED).model.parameters()) / 2**20
    assert all(peaks[name] >= (whole if name == "ddp" else whole / 4) for name in WAYS)
    assert "prefetch auto: planned" in shown
    assert shown.count("losses agree at every step") == len(WAYS) - 1


def test_one_way_of_several_whose_losses_are_others_is_named(four: Pool) -> None:
    code, shown = four.run(4, compare, dataclasses.replace(SHARED, steps=2), True)[0]
    assert code == 1
    assert shown.count("losses agree at every step") == len(WAYS) - 1
    assert "overlap and ddp: LOSSES DISAGREE from step 1 on" in shown


def kept(me: Rank) -> dict[str, list[tuple[bool, int]]]:
    return {
        trainer.name: [
            (isinstance(module, FSDPModule), sum(p.numel() for p in _shards(module))) for module in trainer.models
        ]
        for trainer in trainers(SHARED)
    }


def _shards(module: nn.Module) -> list[torch.Tensor]:
    return [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]


def test_a_rank_keeps_its_shards_alone(four: Pool) -> None:
    whole = sum(p.numel() for p in alone(SHARED).model.parameters())
    for found in four.run(4, kept):
        assert found["ddp"] == [(False, whole)]
        for name in ("overlap", "fsdp2", "linears"):
            assert found[name] == [(True, whole // 4)], name


@pytest.mark.slow
def test_all_three_kinds_of_ranks_train_the_model_of_one_process(fresh_ranks: Callable[..., Pool]) -> None:
    config = dataclasses.replace(SHARED, fsdp=2, tp=2, pp=2, schedule="zbv", compare=False)
    losses, text = reference(config, 3)
    for ((found, written),) in (by_name.values() for by_name in fresh_ranks(8).run(8, losses_and_text, config, 3)):
        assert found == pytest.approx(losses, rel=1e-5)
        assert written == text
