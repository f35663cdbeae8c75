"""Benchmark of FSDP2's collectives alone and of a training step with them, ours compared with torch's.

    python -m bench.fsdp --json result.json

``alone`` times all-gather and reduce-scatter in place, in preallocated memory, as FSDP2 calls them. They are compared
with gloo on CPU and with NCCL on GPUs. The size is that of the gathered tensor, or of the tensor that is scattered.
Every result is checked on 0/1 values, whose sums are exact. The rows "gradients" reduce bfloat16 gradients in float32,
with the copy of the gradients into the tensor that is scattered; the size is that in float32. torch's way casts them
and sends float32. Ours sends bfloat16, and "cast first" is ours if it casts and sends float32 too. ``step`` times
forward, backward and SGD of a stack of linear layers, each sharded by ``fully_shard``, without and with
`symm_overlap.fsdp.apply`. It also measures how far memory rises above its level before the step.

Methods take turns in shuffled order. A figure is the median of the slowest rank. The targets, on CPU with two ranks:
twice as fast as gloo from 1 MiB up, and never slower in a step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import symm_overlap.fsdp
from bench.harness.check import first_difference
from bench.harness.environment import environment
from bench.harness.json_file import add_json_option, write_json
from bench.harness.launch import Rank, launch
from bench.harness.memory import MALLOC, meter_of, variables
from bench.harness.report import environment_lines
from bench.harness.timing import Timed, over_ranks, time_methods
from symm_overlap._torch import all_gather_single, reduce_scatter_single
from symm_overlap.fsdp.communication.collectives import all_gather, reduce_scatter
from symm_overlap.fsdp.communication.slots import Slots
from symm_overlap.settings import current

MIB = 1 << 20
SIZES = (MIB // 16, MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
TARGET, FROM = 2.0, MIB


class Model(NamedTuple):
    """The sizes of a stack of layers, and the number of rows in a rank's batch."""

    width: int
    layers: int
    rows: int


MODELS = (Model(256, 8, 32), Model(1024, 8, 64), Model(2048, 6, 64), Model(4096, 3, 16))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Return 0 if every target is met, else 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.fsdp", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--world", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--rounds", type=int, default=11, help="rounds of each case (default 11)")
    parser.add_argument("--most", type=int, default=SIZES[-1], metavar="BYTES", help="skip tensors larger than this")
    parser.add_argument("--only", choices=("alone", "step"), help="run only this part (default: both)")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.world < 2:
        parser.error(f"--rounds is {options.rounds} and --world {options.world}; give 1 and 2 or more")
    described = environment(options.device, options.world, 1)
    print(environment_lines(described), flush=True)
    rows, met = [], True
    for name, part in (("alone", _alone), ("step", _step)):
        if options.only in (None, name):
            found, good = part(options)
            rows += found
            met = met and good
    print(f"\n  {'met' if met else 'MISSED'}: the targets")
    write_json(options.json, described, rows=rows)
    return 0 if met else 1


def _alone(options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    sizes = [size for size in SIZES if size <= options.most]
    ranks = launch(_run_alone, options.world, options.device, sizes, options.rounds)
    print(f"\n  {'collective':16}{'KiB':>9}{'torch, ms':>12}{'cast first':>12}{'ours, ms':>12}{'x as fast':>11}")
    rows, met = [], True
    for index, case in enumerate(ranks[0]):
        name, size = case["collective"], case["bytes"]
        ways = [way for way in ("torch", "cast first", "ours") if way in case]
        times = {way: over_ranks([rank[index][way] for rank in ranks])["median_ms"] for way in ways}
        wrong = [rank[index]["wrong"] for rank in ranks if rank[index]["wrong"]]
        ratio = times["torch"] / times["ours"]  # type: ignore[operator]
        good = not wrong and (size < FROM or ratio >= TARGET)
        met = met and good
        rows.append({"part": "alone", "collective": name, "bytes": size, **times, "wrong": wrong})
        verdict = wrong[0] if wrong else "" if good else "MISSED"
        cast = f"{times['cast first']:>12.3f}" if "cast first" in times else f"{'':12}"
        figures = f"{times['torch']:>12.3f}{cast}{times['ours']:>12.3f}{ratio:>11.2f}"
        print(f"  {name:16}{size // 1024:>9}{figures}  {verdict}", flush=True)
    return rows, met


def _run_alone(rank: Rank, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    return [case(rank, size, rounds) for case in (_gather, _reduce, _gradients) for size in sizes]


def _zeros_and_ones(rank: int, numel: int, device: torch.device) -> Tensor:
    made = torch.randint(2, (numel,), generator=torch.Generator().manual_seed(rank), dtype=torch.float32)
    return made.to(device)


def _gather(rank: Rank, size: int, rounds: int) -> dict[str, Any]:
    numel = size // 4 // rank.world
    shards = [_zeros_and_ones(each, numel, rank.device) for each in range(rank.world)]
    slots = Slots("all-gather", rank.group, rank.device, 3, current())
    slots.reserve(3, size)
    kept = torch.full((rank.world * numel,), float("nan"), device=rank.device)
    kept.chunk(rank.world)[rank.rank].copy_(shards[rank.rank])

    def ours() -> Tensor:
        output = slots.allocate(kept.shape, kept.dtype)
        all_gather(slots, output, output.chunk(rank.world)[rank.rank])
        return output

    def torchs() -> Tensor:
        all_gather_single(kept, kept.chunk(rank.world)[rank.rank], group=rank.group)
        return kept

    for _ in range(slots.count):  # every slot holds this rank's own shard from now on
        output = slots.allocate(kept.shape, kept.dtype).fill_(float("nan"))
        output.chunk(rank.world)[rank.rank].copy_(shards[rank.rank])
        all_gather(slots, output, output.chunk(rank.world)[rank.rank])
        del output
    return _measure(rank, "all-gather", size, {"torch": torchs, "ours": ours}, torch.cat(shards), rounds)


def _reduce(rank: Rank, size: int, rounds: int) -> dict[str, Any]:
    numel = size // 4 // rank.world
    inputs = [_zeros_and_ones(each, rank.world * numel, rank.device) for each in range(rank.world)]
    slots = Slots("reduce-scatter", rank.group, rank.device, 2, current())
    slots.reserve(2, size)
    mine, output = inputs[rank.rank], torch.full((numel,), float("nan"), device=rank.device)

    def ours() -> Tensor:
        reduce_scatter(slots, output, slots.allocate(mine.shape, mine.dtype), dist.ReduceOp.SUM)
        return output

    def torchs() -> Tensor:
        reduce_scatter_single(output, mine, group=rank.group, op=dist.ReduceOp.SUM)
        return output

    for _ in range(slots.count):
        reduce_scatter(slots, output, slots.allocate(mine.shape, mine.dtype).copy_(mine), dist.ReduceOp.SUM)
    expected = torch.stack([each.chunk(rank.world)[rank.rank] for each in inputs]).sum(0)
    return _measure(rank, "reduce-scatter", size, {"torch": torchs, "ours": ours}, expected, rounds)


def _gradients(rank: Rank, size: int, rounds: int) -> dict[str, Any]:
    numel = size // 4 // rank.world
    inputs = [_zeros_and_ones(each, rank.world * numel, rank.device).bfloat16() for each in range(rank.world)]
    slots = Slots("reduce-scatter", rank.group, rank.device, 2, current())
    slots.reserve(2, size)
    mine, output = inputs[rank.rank], torch.full((numel,), float("nan"), device=rank.device)
    wide = torch.empty(mine.shape, device=rank.device)

    def torchs() -> Tensor:
        reduce_scatter_single(output, wide.copy_(mine), group=rank.group, op=dist.ReduceOp.SUM)
        return output

    def ours_in(dtype: torch.dtype) -> Tensor:
        reduce_scatter(slots, output, slots.allocate(mine.shape, dtype).copy_(mine), dist.ReduceOp.SUM)
        return output

    expected = torch.stack([each.chunk(rank.world)[rank.rank] for each in inputs]).float().sum(0)
    ways = {"cast first": partial(ours_in, torch.float32), "ours": partial(ours_in, torch.bfloat16)}
    return _measure(rank, "gradients", size, {"torch": torchs, **ways}, expected, rounds)


def _measure(
    rank: Rank, name: str, size: int, ways: dict[str, Callable[[], Tensor]], expected: Tensor, rounds: int
) -> dict[str, Any]:
    wrong = [first_difference(way, call(), expected) for way, call in ways.items()]
    samples = time_methods(rank, {way: Timed(call) for way, call in ways.items()}, rounds)
    wrong += [first_difference(f"{way}, at the end", call(), expected) for way, call in ways.items()]
    return {"collective": name, "bytes": size, "wrong": "; ".join(filter(None, wrong)), **samples}


def _step(options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    with variables(MALLOC):
        ranks = launch(_run_step, options.world, options.device, MODELS, options.rounds)
    print(f"\n  {'width':>7}{'layers':>8}{'rows':>6}{'torch, ms':>12}{'ours, ms':>12}{'x as fast':>11}", end="")
    print(f"{'torch, MiB':>12}{'ours, MiB':>12}{'slots, MiB':>12}")
    rows, met = [], True
    for index, model in enumerate(MODELS):
        times = {way: over_ranks([rank[index][way] for rank in ranks])["median_ms"] for way in ("torch", "ours")}
        memory = {way: max(rank[index][f"{way} growth"] for rank in ranks) / MIB for way in ("torch", "ours")}
        slots = max(rank[index]["slots"] for rank in ranks) / MIB
        ratio = times["torch"] / times["ours"]  # type: ignore[operator]
        met = met and ratio >= 1
        rows.append({"part": "step", **model._asdict(), **times, "growth": memory, "slots": slots})
        print(
            f"  {model.width:>7}{model.layers:>8}{model.rows:>6}{times['torch']:>12.2f}{times['ours']:>12.2f}", end=""
        )
        print(f"{ratio:>11.2f}{memory['torch']:>12.1f}{memory['ours']:>12.1f}{slots:>12.1f}", flush=True)
    return rows, met


def _run_step(rank: Rank, models: Sequence[Model], rounds: int) -> list[dict[str, Any]]:
    return [_train(rank, model, rounds) for model in models]


def _train(rank: Rank, model: Model, rounds: int) -> dict[str, Any]:
    """Return times, growth of memory in a step and samples of both ways, and the memory of the slots."""
    mesh = DeviceMesh.from_group(rank.group, rank.device.type)
    meter, steps, losses = meter_of(rank.device), {}, {}
    found: dict[str, Any] = {}
    torch.manual_seed(rank.rank)
    x = torch.randn(model.rows, model.width, device=rank.device)
    for way in ("torch", "ours"):
        torch.manual_seed(7)
        layers = [nn.Sequential(nn.Linear(model.width, model.width), nn.GELU()) for _ in range(model.layers)]
        stack = nn.Sequential(*layers).to(rank.device)
        for layer in stack:
            fully_shard(layer, mesh=mesh)
        fully_shard(stack, mesh=mesh)
        before = meter.standing()
        if way == "ours":
            symm_overlap.fsdp.apply(stack)
        optimizer = torch.optim.SGD(stack.parameters(), lr=1e-3)

        def step(stack: nn.Module = stack, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            loss = stack(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        losses[way] = [step() for _ in range(3)]
        if way == "ours":
            found["slots"] = meter.standing() - before
        found[f"{way} growth"] = meter.growth(step)
        steps[way] = step
    torch.testing.assert_close(losses["ours"], losses["torch"])
    return {**found, **time_methods(rank, {way: Timed(step) for way, step in steps.items()}, rounds)}


if __name__ == "__main__":
    sys.exit(main())
