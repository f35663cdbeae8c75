"""The pipelined model has the weights, losses, gradients and text of the whole model, with every schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
import torch

from symm_overlap.demo.config import TrainConfig
from symm_overlap.demo.forms import explicit, forms_of
from symm_overlap.demo.pipeline_trainer import PipelineTrainer, one_microbatch
from symm_overlap.demo.sample import generate as generate_text
from symm_overlap.demo.training import train_as
from symm_overlap.pipeline import verify
from symm_overlap.pipeline.generators import GENERATORS, generate
from tests.demo.models import CONFIG, alone, here, windows
from tests.demo.test_model import SPLIT
from tests.demo.test_training import OffFromStep3
from tests.quick import one_in
from tests.ranks import Pool, Rank

PIPELINE = dataclasses.replace(CONFIG, tp=2, pp=2, schedule="zbv", batch=4)


def pipelined(config: TrainConfig) -> PipelineTrainer:
    me = here(config.pp)
    assert me.pipeline is not None
    form = forms_of(config, me)[0]
    return PipelineTrainer(config, form, me.group, me.device, me.pipeline)


def losses_of_training(me: Rank, config: TrainConfig, steps: int) -> list[float]:
    trainer, batches = pipelined(config), windows(config)
    return [trainer.step(batches.next()) for _ in range(steps)]


def reference(config: TrainConfig, steps: int) -> list[float]:
    trainer, batches = alone(config), windows(config)
    return [trainer.step(batches.next()) for _ in range(steps)]


@pytest.mark.parametrize("name", one_in(2, ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipe"]))
def test_pipelined_training_has_the_losses_of_one_process(four: Pool, name: str) -> None:
    config = dataclasses.replace(PIPELINE, schedule=name)
    expected = reference(config, 6)
    assert expected[-1] < expected[0] - 0.3, "the reference does not learn, so equal losses would say little"
    for losses in four.run(4, losses_of_training, config, 6):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_four_parts_of_one_rank_each_train_the_same_model(four: Pool) -> None:
    config = dataclasses.replace(PIPELINE, tp=1, pp=4, schedule="1F1B", microbatches=2)
    for losses in four.run(4, losses_of_training, config, 6):
        assert losses == pytest.approx(reference(config, 6), rel=1e-5)


def test_bfloat16_training_stays_near_float32(four: Pool) -> None:
    expected = reference(PIPELINE, 6)
    for losses in four.run(4, losses_of_training, dataclasses.replace(PIPELINE, dtype="bfloat16"), 6):
        assert losses == pytest.approx(expected, rel=2e-2)
        assert losses != expected


def pieces_and_gradients(me: Rank, config: TrainConfig) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of each stage of this rank, by the names of the parameters in the whole model."""
    trainer = pipelined(config)
    trainer.gradients(windows(config).next())
    found = []
    for index, model in zip(trainer._mine, trainer.models, strict=True):
        first_block = max(index - 1, 0)  # the stages are: embedding, block, block, head
        named = {name.replace("blocks.0", f"blocks.{first_block}"): p for name, p in model.named_parameters()}
        found.append({name: p.grad for name, p in named.items() if p.grad is not None})
    return found


def test_every_gradient_is_that_of_one_process_and_no_weight_is_there_twice(four: Pool) -> None:
    # Losses alone would not show a wrong gradient: Adam hides it if a gradient is off by a factor.
    trainer = alone(PIPELINE)
    trainer.gradients(windows(PIPELINE).next())
    expected = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    found = four.run(4, pieces_and_gradients, PIPELINE)
    for column in (0, 1):
        stages = [each for rank in (column, column + 2) for each in found[rank]]
        assert sorted(name for stage in stages for name in stage) == sorted(expected)
        for name, gradient in ((name, grad) for stage in stages for name, grad in stage.items()):
            dim = SPLIT.get(name.rsplit(".", 1)[-1])
            part = expected[name] if dim is None else expected[name].chunk(2, dim)[column]
            error = (gradient - part).norm() / part.norm()
            assert error < 1e-5, f"{name} in column {column}: relative error {error:.1e}"


def text_after_training(me: Rank, config: TrainConfig) -> str:
    trainer, batches = pipelined(config), windows(config)
    for _ in range(3):
        trainer.step(batches.next())
    return generate_text(trainer, "The ", 20, config.seq, 5)


@pytest.mark.parametrize("name", ["zbv", "DualPipe"])
def test_every_rank_generates_the_text_of_one_process(four: Pool, name: str) -> None:
    config = dataclasses.replace(PIPELINE, schedule=name)
    trainer, batches = alone(config), windows(config)
    for _ in range(3):
        trainer.step(batches.next())
    expected = generate_text(trainer, "The ", 20, config.seq, 5)
    assert four.run(4, text_after_training, config) == [expected] * 4


def compare(me: Rank, wrong: bool) -> tuple[int, str]:
    config, place = dataclasses.replace(PIPELINE, steps=4, compare=True), here(2)
    forms = forms_of(config, place)
    if wrong:
        forms[1] = explicit(OffFromStep3(place.group))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = train_as(config, place, forms)
    return code, out.getvalue()


@pytest.mark.slow
def test_compare_trains_two_pipelines_side_by_side(four: Pool) -> None:
    code, shown = four.run(4, compare, False)[0]
    assert code == 0
    assert "tiny model, 0.14 M parameters, on 2 x 2 x cpu as a pipeline of 4 stages in float32" in shown
    assert "losses agree at every step" in shown
    code, shown = four.run(4, compare, True)[0]
    assert code == 1
    assert "LOSSES DISAGREE" in shown


@pytest.mark.parametrize("name", GENERATORS)
def test_one_microbatch_runs_on_the_stages_of_every_schedule(name: str) -> None:
    schedule = generate(name, 4, 8)
    once = one_microbatch(schedule)
    assert once.placement == schedule.placement
    assert once.microbatches == schedule.pipelines
    verify(once).raise_for_problems()


def timed_training(me: Rank, path: str) -> str:
    config, place = dataclasses.replace(PIPELINE, steps=4, timeline=path), here(2)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert train_as(config, place, forms_of(config, place)) == 0
    return out.getvalue()


def test_the_timeline_has_the_real_step_and_the_simulated_one(four: Pool, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    shown, *others = four.run(4, timed_training, str(path))
    assert others == [""] * 3, "only rank 0 may print"
    line = shown.splitlines()[-1]
    found = re.fullmatch(
        r"the pipeline took (\S+) ms in the last step \(median of the 2 before it: (\S+)\); "
        r"simulated with the costs of those: (\S+) ms, off by (\S+)% \((\S+)% from the median\)",
        line,
    )
    assert found, line
    measured, usual, simulated, off, usually = map(float, found.groups())
    assert off == pytest.approx(100 * (simulated / measured - 1), abs=0.2)
    assert usually == pytest.approx(100 * (simulated / usual - 1), abs=0.2)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    kinds = ("measured, 1 of 2", "measured, 2 of 2", "simulated")
    assert sorted(names.values()) == [f"rank {rank}, {kind}" for rank in (0, 1) for kind in kinds]
    ends = {"measured": 0.0, "simulated": 0.0}
    ran: dict[str, list[str]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            kind = names[event["pid"]].split(", ")[1]
            ends[kind] = max(ends[kind], (event["ts"] + event["dur"]) / 1e3)
            if event["cat"] in "FIWB":
                ran[names[event["pid"]]].append(event["name"])
    assert ends == pytest.approx({"measured": measured, "simulated": simulated}, abs=0.006)
    for rank in (0, 1):
        rows = [sorted(ran[f"rank {rank}, {kind}"]) for kind in kinds]
        assert rows[0]
        assert rows[0] == rows[1] == rows[2]
