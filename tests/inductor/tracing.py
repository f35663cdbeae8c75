"""Graphs of small programs, without Inductor: traced, and changed by the pass."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass
from symm_overlap.inductor.report import GraphReport, clear, recorded

from .cases import Program


def inputs_of(program: Program, world: int, name: str, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """The tensors that a program asks for, with values 0 and 1."""
    made: list[Tensor] = []
    generator = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> Tensor:
        made.append(torch.randint(0, 2, shape, generator=generator).to(dtype))
        return made[-1].clone()

    program(world, name, new)
    return made


def traced(program: Program, world: int, name: str, inputs: list[Tensor]) -> GraphModule:
    """The program as a graph of its inputs."""

    def run(*tensors: Tensor) -> Any:
        left = list(tensors)
        return program(world, name, lambda *shape: left.pop(0))

    graph = make_fx(run, tracing_mode="fake")(*[tensor.clone() for tensor in inputs])
    for node in graph.graph.nodes:  # as Inductor does before its passes: those may change strides
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    graph.recompile()
    return graph


def overlapped(graph: GraphModule, strict: bool = False) -> tuple[GraphModule, GraphReport]:
    """A copy of the graph, changed by the pass, and the pass's report."""
    changed = copy.deepcopy(graph)
    clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        OverlapPass(Choices(strict))(changed.graph)
    changed.recompile()
    (found,) = recorded().graphs
    return changed, found
