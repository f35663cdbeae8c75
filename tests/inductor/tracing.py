"""Trace small programs without Inductor, and change their graphs by the pass. Compile models with torch.compile up to
the pass only, because generating code takes longest.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass
from symm_overlap.inductor.report import GraphReport, clear, recorded

from .cases import Program


def inputs_of(program: Program, world: int, name: str, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Return the tensors that a program requests, with values 0 and 1."""
    made: list[Tensor] = []
    generator = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> Tensor:
        made.append(torch.randint(0, 2, shape, generator=generator).to(dtype))
        return made[-1].clone()

    program(world, name, new)
    return made


def traced(program: Program, world: int, name: str, inputs: list[Tensor]) -> GraphModule:
    """Return the program as a graph whose arguments are its inputs."""

    def run(*tensors: Tensor) -> Any:
        left = list(tensors)
        return program(world, name, lambda *shape: left.pop(0))

    graph = make_fx(run, tracing_mode="fake")(*[tensor.clone() for tensor in inputs])
    for node in graph.graph.nodes:  # as Inductor does before its passes, which may change strides
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    graph.recompile()
    return graph


def compiled_up_to_the_pass(module: Callable[..., Any], custom_pass: OverlapPass | None, **options: Any) -> Any:
    """Return the model, compiled as Inductor does it up to the pass. The pass runs if it is not None. Then the graphs
    run without code generation.
    """

    def run_graph(graph: GraphModule, example_inputs: Any, **_: Any) -> Callable[..., Any]:
        view_to_reshape(graph)
        if custom_pass is not None:
            custom_pass(graph.graph)
            graph.recompile()
        return make_boxed_func(graph.forward)

    return torch.compile(module, backend=partial(compile_fx, inner_compile=run_graph), **options)


def overlapped(graph: GraphModule, strict: bool = False) -> tuple[GraphModule, GraphReport]:
    """Return a copy of the graph, changed by the pass, and the pass's report."""
    changed = copy.deepcopy(graph)
    clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        OverlapPass(Choices(strict))(changed.graph)
    changed.recompile()
    (found,) = recorded().graphs
    return changed, found
