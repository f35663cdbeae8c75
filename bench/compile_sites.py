"""Count the collectives that torch's own pass and our pass fuse with matmuls, on the same graphs of compiled models.

    python -m bench.compile_sites --json result.json

Every model is traced as `torch.compile` does, forward and backward, for fake groups of several sizes without real
peers. No kernel is compiled. Each pass works on its own copy of each graph. A collective counts as fused if it is gone
afterwards. Inductor's other passes run as well, and alone they must leave all collectives in the graph. Goal: our pass
fuses every collective that torch's pass fuses. ``beside a matmul`` counts the collectives that feed a matmul or follow
one.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

import symm_overlap
from bench.harness import NotAvailableError
from bench.harness.dtensor_models import MODELS, Size, local
from bench.harness.environment import environment
from bench.harness.json_file import add_json_option, write_json
from bench.harness.torchs_pass import OPTIONS, unlocked

WORLDS = (2, 4, 8)
SIZE = Size(seq=16, width=32, hidden=64, heads=8)


@dataclass(frozen=True)
class Sites:
    """The collectives of one graph, by the names of their nodes.

    Attributes:
        all: every collective.
        beside: how many of them our pass finds beside a matmul.
        torchs, ours: the collectives that each pass fuses.
    """

    all: frozenset[str]
    beside: int
    torchs: frozenset[str]
    ours: frozenset[str]

    @property
    def missed(self) -> frozenset[str]:
        """Collectives that torch's pass fuses and ours does not."""
        return self.torchs - self.ours

    def counts(self) -> tuple[int, int, int, int]:
        """Return four counts: all, beside a matmul, fused by torch's pass, fused by ours."""
        return len(self.all), self.beside, len(self.torchs), len(self.ours)


def main(arguments: Sequence[str] | None = None) -> int:
    """Count and print. Return 0 if ours is a superset on every graph, else 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.compile_sites", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--worlds", default=",".join(map(str, WORLDS)), help="sizes of the groups (default: %(default)s)"
    )
    add_json_option(parser)
    options = parser.parse_args(arguments)
    worlds = [int(world) for world in options.worlds.split(",")]
    rows = []
    for name in MODELS:
        for world in worlds:
            try:
                rows.append(row(name, world, sites_of(name, world)))
            except NotAvailableError as reason:
                print(f"{name}: not available: {reason}", file=sys.stderr)
    print(table(rows))
    write_json(options.json, environment("cpu", max(worlds), 1), rows=rows)
    return 1 if any(one["missed"] for one in rows) else 0


def row(model: str, world: int, graphs: Sequence[Sites]) -> dict[str, Any]:
    """Return the figures of one model for one world size, from its forward and its backward graph, in that order."""
    forward, backward = graphs
    return {
        "model": model,
        "world": world,
        "forward": forward.counts(),
        "backward": backward.counts(),
        "missed": sorted(forward.missed | backward.missed),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as a table with the verdict. World sizes with the same figures share a line."""
    titles = "".join(f"{title:>14}" for title in ("collectives", "beside matmul", "torch's pass", "ours"))
    lines = [f"{'forward + backward':24}{'ranks':10}{titles}"]
    merged: dict[tuple[Any, ...], list[int]] = {}
    for one in rows:
        merged.setdefault((one["model"], one["forward"], one["backward"]), []).append(one["world"])
    for (model, forward, backward), worlds in merged.items():
        cells = "".join(f"{f'{one} + {other}':>14}" for one, other in zip(forward, backward, strict=True))
        lines.append(f"{model:24}{', '.join(map(str, worlds)):10}{cells}")
    missed = [f"{one['model']}, {one['world']} ranks: {', '.join(one['missed'])}" for one in rows if one["missed"]]
    lines += [
        "",
        f"{'MISSED' if missed else 'met'}: what torch's pass fuses, ours fuses too, in {2 * len(rows)} graphs",
    ]
    return "\n".join(lines + missed)


def sites_of(name: str, world: int) -> list[Sites]:
    """Return the collectives of a model's forward graph and of its backward graph."""
    found: list[Sites] = []
    with _fake_group(world), unlocked(), _nothing_cached():
        group = dist.group.WORLD
        assert group is not None
        mesh = DeviceMesh.from_group(group, "cpu")
        torch.manual_seed(0)
        model = MODELS[name]
        compiled = torch.compile(model.make(SIZE, mesh), backend=partial(compile_fx, inner_compile=_noting(found)))
        local(compiled(model.inputs(SIZE, world))).sum().backward()
    return found


def _noting(found: list[Sites]) -> Callable[..., Callable[[list[Tensor]], Any]]:
    """Return an inner compiler that adds the collectives of each graph to ``found`` and compiles nothing."""

    def inner(module: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[[list[Tensor]], Any]:
        view_to_reshape(module)  # as Inductor does before its passes
        names = _collectives(module.graph)
        if unfused := _fused(module, {}):
            raise RuntimeError(f"Inductor removes these collectives even without either pass: {sorted(unfused)}")
        symm_overlap.inductor.clear()
        ours = _fused(module, symm_overlap.inductor.options())
        (report,) = symm_overlap.inductor.report().graphs
        found.append(Sites(names, len(report.candidates), _fused(module, OPTIONS), ours))

        def run(arguments: list[Tensor]) -> Any:
            given = list(arguments)
            arguments.clear()
            return module(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return inner


def _fused(module: GraphModule, options: dict[str, Any]) -> frozenset[str]:
    """Run Inductor's passes with these options on a copy, and return the collectives that are gone afterwards."""
    changed = copy.deepcopy(module)
    values = [node.meta["val"] for node in module.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    with inductor_config.patch(options), V.set_fake_mode(detect_fake_mode(values)), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # passes warn of a graph in which they fuse nothing
        post_grad_passes(changed, False)
    return _collectives(module.graph) - _collectives(changed.graph)


def _collectives(graph: Graph) -> frozenset[str]:
    """Return the names of all functional collectives of a graph, including in-place ones."""
    wait = torch.ops._c10d_functional.wait_tensor.default
    calls = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload) and node.target is not wait]
    return frozenset(node.name for node in calls if node.target.namespace == "_c10d_functional")


@contextmanager
def _fake_group(world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _nothing_cached() -> Iterator[None]:
    """Disable the caches: a graph from a cache would not reach the inner compiler."""
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


if __name__ == "__main__":
    sys.exit(main())
