"""``symm-overlap train``: train a byte-level language model with tensor, sequence, pipeline and data parallelism."""

from __future__ import annotations

import argparse
import sys

from symm_overlap.cli import launch
from symm_overlap.demo.config import SIZES, LaunchEnvironment, TrainConfig, allowed_tp, problem
from symm_overlap.demo.forms import DTYPES
from symm_overlap.demo.rank import is_first, launch_environment
from symm_overlap.demo.stages import DEFAULT_SCHEDULE, pipeline_problem
from symm_overlap.demo.text import length_problem, read_text
from symm_overlap.demo.training import train
from symm_overlap.pipeline.generators import GENERATORS


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``train`` sub-command."""
    default = TrainConfig()
    sizes = "; ".join(
        f"{name}: width {s.dim}, {s.layers} layers, {s.heads} heads, {s.batch} x {s.seq} bytes a step"
        for name, s in SIZES.items()
    )
    parser = subparsers.add_parser(
        "train",
        help="train a language model with the ops of this package",
        description="Trains a Llama-style byte-level language model with tensor and sequence parallelism. --pp adds "
        "pipeline parallelism, and --fsdp adds data parallelism with sharded parameters. The command starts its own "
        "ranks on this host, or joins the ranks that torchrun has started.",
    )
    parser.add_argument("--text", metavar="FILE", help="text to learn (default: the text of pydoc_data.topics)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default.device, help="default: %(default)s")
    parser.add_argument(
        "--tp",
        type=int,
        metavar="N",
        help="ranks that share every layer (default: under torchrun, its ranks divided by --pp and --fsdp; otherwise "
        "1 with --fsdp, 2 on cpu, and on cuda as many as the model and the GPUs allow)",
    )
    parser.add_argument(
        "--fsdp",
        type=int,
        default=default.fsdp,
        metavar="N",
        help="data-parallel ranks: each trains on its part of a step's windows and keeps a shard of the parameters; "
        "the run has N times --tp times --pp ranks (default: 1)",
    )
    _add_pipeline(parser, default)
    parser.add_argument("--steps", type=int, default=default.steps, metavar="N", help="steps (default: %(default)s)")
    parser.add_argument("--size", choices=tuple(SIZES), default=default.size, help=f"default: %(default)s. {sizes}")
    parser.add_argument("--seq", type=int, metavar="N", help="bytes in a window (default: depends on --size)")
    parser.add_argument("--batch", type=int, metavar="N", help="windows in a step (default: depends on --size)")
    parser.add_argument("--lr", type=float, help="learning rate after warm-up (default: depends on --size)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=default.seed, help="seed of weights, batches, sample (default: 0)")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also train the same model with plain collectives and matmuls (with --compile: in eager mode; with "
        "--fsdp: once for each other way to share the parameters, and print the peak memory of each), and exit with "
        "code 1 if the losses differ",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="train the model in DTensor style, compiled with the overlap pass, and print what that fused",
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="write a Chrome trace of the last step on rank 0, or with --pp on all ranks, beside the simulated step",
    )
    parser.add_argument(
        "--sample", type=int, default=default.sample, metavar="N", help="bytes to generate (default: %(default)s)"
    )
    parser.add_argument("--prompt", default=default.prompt, help="start of the sample (default: %(default)r)")


def _add_pipeline(parser: argparse.ArgumentParser, default: TrainConfig) -> None:
    """Add the options of pipeline parallelism."""
    parser.add_argument(
        "--pp", type=int, default=default.pp, metavar="N", help="parts of the pipeline, of --tp ranks each (default: 1)"
    )
    parser.add_argument(
        "--schedule",
        metavar="NAME",
        help=f"pipeline schedule: {', '.join(GENERATORS)}, ZBV, ZB1P, or a CSV file (default: {DEFAULT_SCHEDULE})",
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        default=default.microbatches,
        metavar="N",
        help="microbatches in a step of the pipeline (default: up to two for each part)",
    )


def run(args: argparse.Namespace) -> int:
    """Check the arguments, then train: in this process if torchrun started it, otherwise in ranks started here."""
    where = launch_environment()
    config = _config(args, where)
    wrong = problem(config, where) or pipeline_problem(config)
    if wrong is None:
        wrong = length_problem(read_text(config.text), config.seq, config.text)
    if wrong is not None:
        if is_first():
            print(f"symm-overlap train: error: {wrong}", file=sys.stderr)
        return 2
    if where.started is not None:
        return train(config)
    try:
        return int(launch.run_ranks(train, (config,), config.ranks))
    except launch.RankError as error:
        print(f"symm-overlap train: {error}", file=sys.stderr)
        return 1


def _config(args: argparse.Namespace, where: LaunchEnvironment) -> TrainConfig:
    size = SIZES[args.size]
    given = {name: value for name, value in vars(args).items() if name in TrainConfig.__dataclass_fields__}
    settings = given | {name: getattr(size, name) for name in ("seq", "batch", "lr") if given[name] is None}
    if args.tp is None:
        others = max(1, args.pp) * max(1, args.fsdp)
        settings["tp"] = _default_tp(args, where, others) if where.started is None else max(1, where.started // others)
    return TrainConfig(**settings)


def _default_tp(args: argparse.Namespace, where: LaunchEnvironment, others: int) -> int:
    """Return how many ranks share a layer by default. ``others`` is the number of groups of such ranks."""
    if args.fsdp > 1:
        return 1
    if args.device == "cpu":
        return 2
    return max((tp for tp in allowed_tp(SIZES[args.size]) if tp <= where.gpus // others), default=1)
