"""A model of `bench.harness.dtensor_models` in eager mode and compiled in three ways, with the times to compile it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph

from bench.harness.dtensor_models import MODELS, Size, local
from bench.harness.launch import Rank
from bench.harness.torchs_pass import OPTIONS, unlocked
from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass

WAYS = ("eager", "compiled", "torch's pass", "ours")
"""Eager mode, unchanged torch.compile, torch.compile with torch's own pass on our ops, and with our pass."""

RELATIVE_ERROR = 1e-5  # allowed against eager mode: results are float32, and the order of summation may differ

Step = Callable[[], list[Tensor]]


class TimedPass(OverlapPass):
    """Our pass, which also sums the seconds that it takes."""

    def __init__(self) -> None:
        super().__init__(Choices())
        self.seconds = 0.0

    def __call__(self, graph: Graph) -> None:
        begin = time.perf_counter()
        super().__call__(graph)
        self.seconds += time.perf_counter() - begin


@dataclass(frozen=True)
class Compilation:
    """The time of the first step of a compiled model, and the time of the pass in it, in seconds.

    ``kernels``: whether the kernels were on disk already, from an earlier compilation of the same model.
    """

    seconds: float
    in_pass: float
    kernels: bool


@dataclass(frozen=True)
class Prepared:
    """A model that is ready to be timed.

    Attributes:
        steps: for each way, a function that runs forward and backward and returns the output and all gradients.
        compilations: of our way, first with nothing on disk, then with the kernels on disk.
        collectives: for each compiled way, the number of collectives left in its graphs.
    """

    steps: dict[str, Step]
    compilations: list[Compilation]
    collectives: dict[str, int]


def prepared(rank: Rank, name: str, size: Size) -> Prepared:
    """Compile a model in every way, and check each way against eager mode. Call this inside `cache_in`.

    Raises:
        ValueError: the results of a way differ from those of eager mode.
    """
    module, x = _module_and_input(rank, name, size)
    steps = {"eager": _step(module, module, x)}
    expected = steps["eager"]()
    compilations: list[Compilation] = []
    left: dict[str, int] = {}
    torch._dynamo.reset()
    _compile_ours(rank, module, x, compilations, kernels=False)
    torch._dynamo.reset()
    for way in WAYS[1:]:
        count = _Collectives()
        options = {"post_grad_custom_post_pass": count}
        with unlocked() if way == "torch's pass" else nullcontext():
            if way == "ours":
                steps[way] = _compile_ours(rank, module, x, compilations, kernels=True, options=options)
            else:
                compiled = torch.compile(module, options=options | (OPTIONS if way != "compiled" else {}))
                steps[way] = _step(compiled, module, x)
            _require_close(way, steps[way](), expected)
        left[way] = count.left
    return Prepared(steps, compilations, left)


def _compile_ours(
    rank: Rank,
    module: nn.Module,
    x: Tensor,
    compilations: list[Compilation],
    kernels: bool,
    options: dict[str, Any] | None = None,
) -> Step:
    """Compile the model with our pass, run and time the first step, and return the step."""
    timed = TimedPass()
    compiled = torch.compile(module, options={"post_grad_custom_pre_pass": timed, **(options or {})})
    step = _step(compiled, module, x)
    rank.start.wait()
    begin = time.perf_counter()
    step()
    compilations.append(Compilation(time.perf_counter() - begin, timed.seconds, kernels))
    return step


def _module_and_input(rank: Rank, name: str, size: Size) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    module = MODELS[name].make(size, DeviceMesh.from_group(rank.group, rank.device.type))
    return module, MODELS[name].inputs(size, rank.world)  # the same on every rank, as a replicated input must be


def _step(forward: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> Step:
    def step() -> list[Tensor]:
        module.zero_grad()
        x.grad = None
        y = local(forward(x))
        y.backward(torch.ones_like(y))
        return [y.detach(), x.grad, *(local(parameter.grad) for parameter in module.parameters())]

    return step


def _require_close(way: str, found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        error = float((one - other).norm() / other.norm())
        if not error <= RELATIVE_ERROR:
            raise ValueError(
                f"{way}: the relative error of a step's result against eager mode is {error:.1e}; "
                f"at most {RELATIVE_ERROR} is allowed"
            )


class _Collectives:
    """A pass that counts the functional collectives that the other passes left in the graphs."""

    def __init__(self) -> None:
        self.left = 0

    def __call__(self, graph: Graph) -> None:
        for node in graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "_c10d_functional":
                self.left += node.target is not torch.ops._c10d_functional.wait_tensor.default


@contextmanager
def cache_in(folder: str) -> Iterator[None]:
    """Inside, kernels are cached in ``folder``, which the ranks may share. Compiled graphs are not cached at all.

    torch.compile tries out the C++ compiler once on a machine. This is done before the body starts.
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = folder
    try:
        with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
            torch.compile(torch.sin)(torch.ones(1000))
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
