"""The training run of one rank, from the first step to the sample, with one model or with several side by side."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

import symm_overlap
from symm_overlap.demo.config import TrainConfig
from symm_overlap.demo.forms import Form, forms_of
from symm_overlap.demo.fused import fused_lines
from symm_overlap.demo.memory import peaks
from symm_overlap.demo.progress import Curve, Report, agreement
from symm_overlap.demo.rank import Rank, join
from symm_overlap.demo.sample import generate, printable
from symm_overlap.demo.text import Windows, read_text
from symm_overlap.demo.timeline import trace_to
from symm_overlap.demo.trainer import Trainer

# Pipelines are imported only if one is trained: importing torch's part of them takes longer than all other imports.
if TYPE_CHECKING:
    from symm_overlap.demo.pipeline_timeline import Clock

# The largest relative difference between losses that --compare allows. bfloat16 has only 8 bits of precision, and the
# two models sum their partial products differently.
ALLOWED_DIFFERENCE = {"float32": 1e-4, "bfloat16": 2e-2}

BROKEN_PIPE_EXIT_CODE = 141
"""The exit code of a rank if the reader of its output has closed the pipe: 128 + SIGPIPE, as a shell reports it."""


def train(config: TrainConfig) -> int:
    """Join the other ranks, run the whole training of this rank, leave the group, and return the exit code."""
    with join(config.device, config.pp, config.fsdp) as here:
        try:
            return train_as(config, here, forms_of(config, here))
        except BrokenPipeError:
            # Exit at once, before the other ranks can notice that this rank is gone. Their error messages would be
            # shown, although a closed pipe is not an error.
            os._exit(BROKEN_PIPE_EXIT_CODE)


def train_as(config: TrainConfig, here: Rank, forms: Sequence[Form]) -> int:
    """Train the model in each of ``forms`` side by side, on the same windows, and return the exit code.

    Only rank 0 prints. The losses of the first form are compared with the losses of all others. The model of the first
    form generates the sample.
    """
    text = read_text(config.text)
    windows = Windows(text, config.seq, config.batch, config.seed)
    curves = [Curve(form.name, peak=peak) for form, peak in zip(forms, _peaks(config, forms, here, text), strict=True)]
    trainers = [_trainer(config, form, here) for form in forms]
    report = Report(curves, config.steps, config.seq * config.batch) if here.rank == 0 else None
    if report:
        print(_headline(config, trainers[0], len(text)), flush=True)
        report.header()
    clock = _clock(config, trainers[0], here)
    for number in range(1, config.steps + 1):
        _step(config, here, number, windows.next(), trainers, curves, clock)
        if report:
            report.step(number)
    timed = clock.conclude(config.timeline) if clock and config.timeline else None
    sample = generate(trainers[0], config.prompt, config.sample, config.seq, config.seed) if config.sample else ""
    if report is None:
        return 0
    report.summary()
    if trainers[0].planned is not None:
        print(trainers[0].planned)
    return _conclude(config, curves, sample, timed)


def _trainer(config: TrainConfig, form: Form, here: Rank) -> Trainer:
    if here.pipeline is None:
        return Trainer(config, form, here.group, here.device, here.data)
    from symm_overlap.demo.pipeline_trainer import PipelineTrainer

    return PipelineTrainer(config, form, here.group, here.device, here.pipeline, here.data)


def _peaks(config: TrainConfig, forms: Sequence[Form], here: Rank, text: bytes) -> list[int] | list[None]:
    """Return the peak memory of each form if ``--fsdp`` runs several forms. Otherwise return None for each form."""
    if here.data is None or len(forms) == 1:
        return [None] * len(forms)
    windows = Windows(text, config.seq, config.batch, config.seed).next()
    return peaks([partial(_trainer, config, form, here) for form in forms], windows, here.device)


def _clock(config: TrainConfig, trainer: Trainer, here: Rank) -> Clock | None:
    """Return the clock that measures the steps of a pipeline, or None if no timeline of a pipeline is requested."""
    if not config.timeline or here.pipeline is None:
        return None
    from symm_overlap.demo.pipeline_timeline import Clock
    from symm_overlap.demo.pipeline_trainer import PipelineTrainer

    assert isinstance(trainer, PipelineTrainer)
    return Clock(trainer, here, config.steps)


def _step(
    config: TrainConfig,
    here: Rank,
    number: int,
    window: Tensor,
    trainers: list[Trainer],
    curves: list[Curve],
    clock: Clock | None,
) -> None:
    traced = config.timeline if number == config.steps and here.rank == 0 and clock is None else None
    # Reverse the order in every other step, because later trainers find the window in the caches.
    order = range(len(trainers)) if number % 2 else reversed(range(len(trainers)))
    with trace_to(traced) if traced else nullcontext():
        for i in order:
            measured = clock if clock is not None and i == 0 and clock.wants(number) else None
            with measured.step() if measured else nullcontext():
                start = time.perf_counter()
                curves[i].losses.append(trainers[i].step(window))
                curves[i].seconds.append(time.perf_counter() - start)


def _conclude(config: TrainConfig, curves: list[Curve], sample: str, timed: str | None) -> int:
    if config.compile:
        print("\n".join(fused_lines(symm_overlap.inductor.report())))
    code = 0
    for other in curves[1:]:
        verdict = agreement(curves[0].losses, other.losses, ALLOWED_DIFFERENCE[config.dtype])
        print(verdict if len(curves) == 2 else f"{curves[0].name} and {other.name}: {verdict}")
        code = code if verdict.ok else 1
    if config.timeline is not None:
        print(f"timeline of step {config.steps}: {printable(config.timeline, sys.stdout.encoding)}")
    if timed is not None:
        print(timed)
    if config.sample:
        print(f"sample:\n{printable(sample, sys.stdout.encoding)}")
    sys.stdout.flush()
    return code


def _headline(config: TrainConfig, trainer: Trainer, text_bytes: int) -> str:
    source = "pydoc_data.topics" if config.text is None else printable(config.text, sys.stdout.encoding)
    ranks = f"{config.tp} x {config.device}"
    if trainer.stages > 1:
        ranks = f"{config.pp} x {ranks} as a pipeline of {trainer.stages} stages"
    if config.fsdp > 1:
        ranks = f"{config.fsdp} x {ranks}, each with a shard of the parameters,"
    return (
        f"{config.size} model, {trainer.parameter_count / 1e6:.2f} M parameters, on {ranks} in "
        f"{config.dtype}; {config.steps} steps of {config.batch} x {config.seq} bytes of {source} ({text_bytes} bytes)"
    )
