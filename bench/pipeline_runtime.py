"""Time one training step of a pipeline, run by torch's runtime and by ours, on the same stages and the same schedule.

    python -m bench.pipeline_runtime --json result.json

There are two CPU ranks with one thread each. A stage has ``layers`` linear layers in float32, each followed by a GELU,
and a microbatch has ``rows`` rows. ``torch`` is torch.distributed.pipelining over gloo, ``c10d`` is our runtime over
gloo, and ``symmetric`` is our runtime with messages through symmetric memory. All three compute the same gradients,
which is checked. ``alone`` is the time of the slower rank's computation without a pipeline: the sum of its forwards and
backwards, which is the bound of a schedule without a bubble. The ways take turns, step by step. A figure is the median
of the slower rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from bench.harness.environment import environment
from bench.harness.json_file import add_json_option, write_json
from bench.harness.launch import Rank, launch
from bench.harness.report import environment_lines
from symm_overlap.pipeline import torch_schedule
from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.runtime import PipelineRuntime, Stage

WORLD, MICROBATCHES = 2, 8
WAYS = ("torch", "c10d", "symmetric", "alone")


class Case(NamedTuple):
    """A schedule, and the sizes of its stages and messages."""

    schedule: str
    width: int
    rows: int
    layers: int

    @property
    def message_kib(self) -> int:
        """The size of one message, an activation, in KiB."""
        return self.width * self.rows * 4 // 1024


CASES = tuple(
    Case(name, *sizes)
    for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
    for sizes in ((64, 64, 2), (512, 128, 2), (1024, 1024, 1), (2048, 64, 1))
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Return 0 if our runtime through symmetric memory is never slower than torch's, else 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline_runtime", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each way (default 15)")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; give 1 or more")
    described = environment("cpu", WORLD, 1)
    print(environment_lines(described), flush=True)
    ranks = launch(_run, WORLD, "cpu", options.rounds)
    print(f"\n  milliseconds of a step with {MICROBATCHES} microbatches")
    heads = (*WAYS, "/ torch")
    print(f"  {'schedule':18}{'width':>7}{'rows':>6}{'layers':>8}{'KiB':>7}" + "".join(f"{head:>11}" for head in heads))
    rows, met = [], True
    for index, case in enumerate(CASES):
        figures = {way: max(rank[index][way] for rank in ranks) for way in WAYS}
        ratio = figures["symmetric"] / figures["torch"]
        met = met and ratio <= 1
        rows.append({**case._asdict(), "message_kib": case.message_kib, **figures})
        sizes = f"{case.width:>7}{case.rows:>6}{case.layers:>8}{case.message_kib:>7}"
        texts = "".join(f"{figures[way]:>11.2f}" for way in WAYS)
        print(f"  {case.schedule:18}{sizes}{texts}{ratio:>11.2f}")
    print(f"\n  {'met' if met else 'MISSED'}: symmetric is never slower than torch")
    write_json(options.json, described, rows=rows)
    return 0 if met else 1


def _stage(case: Case, index: int) -> nn.Module:
    torch.manual_seed(index)
    layers = [nn.Sequential(nn.Linear(case.width, case.width), nn.GELU()) for _ in range(case.layers)]
    return nn.Sequential(*layers)


def _run(rank: Rank, rounds: int) -> list[dict[str, float]]:
    return [_measure(rank, case, rounds) for case in CASES]


def _measure(rank: Rank, case: Case, rounds: int) -> dict[str, float]:
    """Return the median time of a step in each way, in milliseconds."""
    schedule = generate(case.schedule, WORLD, MICROBATCHES)
    mine = schedule.stages_of_ranks[rank.rank]
    loss = nn.functional.mse_loss
    torch.manual_seed(7)
    x, target = (torch.randn(MICROBATCHES * case.rows, case.width) for _ in range(2))
    steps: dict[str, Callable[[], object]] = {}
    modules: dict[str, dict[int, nn.Module]] = {way: {index: _stage(case, index) for index in mine} for way in WAYS}
    stages = [
        PipelineStage(module, index, schedule.stages, torch.device("cpu"), group=rank.group)
        for index, module in modules["torch"].items()
    ]
    torchs = torch_schedule(schedule, stages, loss)
    args = (x,) if 0 in mine else ()
    wanted = target if schedule.stages - 1 in mine else None
    steps["torch"] = lambda: torchs.step(*args, target=wanted, return_outputs=False)
    for way in ("c10d", "symmetric"):
        ours = PipelineRuntime(
            [Stage(module, index) for index, module in modules[way].items()],
            schedule,
            group=rank.group,
            loss=loss,
            transport=way,
        )
        steps[way] = lambda ours=ours: ours.step(x, target=target, return_outputs=False)  # type: ignore[misc]
    steps["alone"] = lambda: _alone(modules["alone"], x, loss)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(-2, rounds):  # untimed: the first step learns the messages, the second one allocates memory
        for way, step in steps.items():
            for module in modules[way].values():
                module.zero_grad()
            rank.start.wait()
            begin = time.perf_counter_ns()
            step()
            if turn >= 0:
                times[way].append((time.perf_counter_ns() - begin) / 1e6)
    for way in ("c10d", "symmetric"):
        for index in mine:
            _check(modules[way][index], modules["torch"][index])
    return {way: statistics.median(each) for way, each in times.items()}


def _alone(modules: dict[int, nn.Module], x: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Do this rank's computation of one step, without a pipeline."""
    for part in x.chunk(MICROBATCHES):
        for index, module in modules.items():
            value = part.detach().requires_grad_(index > 0)
            loss(module(value), part).backward()


def _check(found: nn.Module, expected: nn.Module) -> None:
    for ours, torchs in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, torchs.grad, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    sys.exit(main())
