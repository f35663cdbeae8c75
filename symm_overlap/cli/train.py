"""``symm-overlap train``: trains a byte-level language model with tensor and sequence parallelism."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from torch import Tensor
from torch.distributed import ProcessGroup

from symm_overlap.cli import launch
from symm_overlap.cli.collectives import Overlap, Plain
from symm_overlap.cli.config import SIZES, Surroundings, TrainConfig, allowed_tp, problem
from symm_overlap.cli.launch import Rank
from symm_overlap.cli.model import Collectives
from symm_overlap.cli.progress import Curve, Report, agreement
from symm_overlap.cli.sample import generate
from symm_overlap.cli.text import Windows, length_problem, read_text
from symm_overlap.cli.timeline import trace_to
from symm_overlap.cli.trainer import Trainer

# How far the losses of --compare may be apart. bfloat16 has 8 bits, and the two sum their partial products differently.
ALLOWED_DIFFERENCE = {"float32": 1e-4, "bfloat16": 2e-2}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``train`` sub-command."""
    default = TrainConfig()
    sizes = "; ".join(
        f"{name}: width {s.dim}, {s.layers} layers, {s.heads} heads, {s.batch} x {s.seq} bytes a step"
        for name, s in SIZES.items()
    )
    parser = subparsers.add_parser(
        "train",
        help="train a language model through the ops",
        description="Trains a Llama-style byte-level language model with tensor and sequence parallelism. Starts its "
        "own ranks on this host, or joins those that torchrun has started.",
    )
    parser.add_argument("--text", metavar="FILE", help="what to learn (default: the text of pydoc_data.topics)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default.device, help="default: %(default)s")
    parser.add_argument("--tp", type=int, metavar="N", help="ranks (default: 2 on cpu, what the GPUs allow on cuda)")
    parser.add_argument("--steps", type=int, default=default.steps, metavar="N", help="default: %(default)s")
    parser.add_argument("--size", choices=tuple(SIZES), default=default.size, help=f"default: %(default)s. {sizes}")
    parser.add_argument("--seq", type=int, metavar="N", help="bytes in a window (default: by size)")
    parser.add_argument("--batch", type=int, metavar="N", help="windows a step (default: by size)")
    parser.add_argument("--lr", type=float, help="learning rate after warm-up (default: by size)")
    parser.add_argument("--dtype", choices=tuple(ALLOWED_DIFFERENCE), default="float32", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=default.seed, help="of weights, batches and sample (default: 0)")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also train an equal model with plain collectives + matmul; exit code 1 if the losses differ",
    )
    parser.add_argument("--timeline", metavar="FILE", help="write a Chrome trace of rank 0's last step")
    parser.add_argument(
        "--sample", type=int, default=default.sample, metavar="N", help="bytes to generate (default: %(default)s)"
    )
    parser.add_argument("--prompt", default=default.prompt, help="what the sample continues (default: %(default)r)")


def run(args: argparse.Namespace) -> int:
    """Checks the arguments, then trains: here where torchrun started this process, else in ranks of its own."""
    where = launch.surroundings()
    config = _config(args, where)
    wrong = problem(config, where)
    if wrong is None:
        wrong = length_problem(read_text(config.text), config.seq, config.text)
    if wrong is not None:
        if launch.is_first():
            print(f"symm-overlap train: error: {wrong}", file=sys.stderr)
        return 2
    if where.started is not None:
        return train(config)
    try:
        return int(launch.run_ranks(train, (config,), config.tp))
    except launch.RankError as error:
        print(f"symm-overlap train: {error}", file=sys.stderr)
        return 1


def _config(args: argparse.Namespace, where: Surroundings) -> TrainConfig:
    size = SIZES[args.size]
    given = {name: value for name, value in vars(args).items() if name in TrainConfig.__dataclass_fields__}
    settings = given | {name: getattr(size, name) for name in ("seq", "batch", "lr") if given[name] is None}
    if args.tp is None:
        wanted = 2 if args.device == "cpu" else max((tp for tp in allowed_tp(size) if tp <= where.gpus), default=1)
        settings["tp"] = where.started or wanted
    return TrainConfig(**settings)


def train(config: TrainConfig) -> int:
    """One rank's whole run, from joining the others to leaving them; returns the exit code."""
    with launch.join(config.device) as here:
        return train_as(config, here, (Overlap, Plain) if config.compare else (Overlap,))


def train_as(config: TrainConfig, here: Rank, kinds: Sequence[Callable[[ProcessGroup], Collectives]]) -> int:
    """Trains one model for each of ``kinds`` side by side, on the same windows; returns the exit code.

    Rank 0 does the talking. With two kinds their losses are compared; the first one's model writes the sample.
    """
    text = read_text(config.text)
    windows = Windows(text, config.seq, config.batch, config.seed)
    trainers = [Trainer(config, kind(here.group), here.group, here.device) for kind in kinds]
    curves = [Curve(trainer.comm.name) for trainer in trainers]
    report = Report(curves, config.steps, config.seq * config.batch) if here.rank == 0 else None
    if report:
        print(_headline(config, trainers[0], len(text)), flush=True)
        report.header()
    for number in range(1, config.steps + 1):
        _step(config, here, number, windows.next(), trainers, curves)
        if report:
            report.step(number)
    sample = generate(trainers[0], config.prompt, config.sample, config.seq, config.seed) if config.sample else ""
    return _conclude(config, report, curves, sample) if report else 0


def _step(
    config: TrainConfig, here: Rank, number: int, window: Tensor, trainers: list[Trainer], curves: list[Curve]
) -> None:
    traced = config.timeline if number == config.steps and here.rank == 0 else None
    # Who goes first alternates: the second finds the window in the caches.
    order = range(len(trainers)) if number % 2 else reversed(range(len(trainers)))
    with trace_to(traced) if traced else nullcontext():
        for i in order:
            start = time.perf_counter()
            curves[i].losses.append(trainers[i].step(window))
            curves[i].seconds.append(time.perf_counter() - start)


def _conclude(config: TrainConfig, report: Report, curves: list[Curve], sample: str) -> int:
    report.summary()
    code = 0
    if len(curves) == 2:
        verdict = agreement(curves[0].losses, curves[1].losses, ALLOWED_DIFFERENCE[config.dtype])
        print(verdict)
        code = 0 if verdict.ok else 1
    if config.timeline is not None:
        print(f"timeline of step {config.steps}: {config.timeline}")
    if config.sample:
        print(f"sample:\n{sample}")
    sys.stdout.flush()
    return code


def _headline(config: TrainConfig, trainer: Trainer, text_bytes: int) -> str:
    source = "pydoc_data.topics" if config.text is None else config.text
    return (
        f"{config.size} model, {trainer.parameter_count / 1e6:.2f} M parameters, on {config.tp} x {config.device} in "
        f"{config.dtype}; {config.steps} steps of {config.batch} x {config.seq} bytes of {source} ({text_bytes} bytes)"
    )
