"""The private APIs of torch.distributed.pipelining. Checked on torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0.

Only `interop` and `torch_runtime` import this file, because schedules alone need no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.pipelining.schedules import _Action as TorchAction
from torch.distributed.pipelining.schedules import _ComputationType as TorchKind
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as TorchRuntime
from torch.distributed.pipelining.stage import _PipelineStageBase as TorchStage
from torch.utils._pytree import tree_leaves

__all__ = ["SPLITS_SHARED_WEIGHTS", "RuntimeOfTables", "TorchAction", "TorchKind", "TorchRuntime", "TorchStage"]

SPLITS_SHARED_WEIGHTS = torch.__version__ >= "2.13"  # a TorchVersion, which compares by number: 2.9 is less
"""True if I and W together compute the right gradient of a weight that a stage uses twice. Before 2.13 they do not."""

Table = dict[int, list[TorchAction | None]]


class RuntimeOfTables(TorchRuntime):
    """Torch's runtime, running tables that are passed to it.

    It has one table for steps with a backward and one for steps without. Torch's own runtime runs the actions of the
    backward in both cases. In a step without a backward it then fails at the turn of a V, and it divides gradients that
    were accumulated before.

    Args:
        stages: the stages of this rank, in ascending order.
        microbatches: how many microbatches a step has.
        loss_fn: the loss of the last stage's output and a microbatch of the target, or None.
        compute: the table of the compute actions alone.
        both: the table of all actions: compute, messages, and actions on parameters.
        forward: the part of ``both`` that a step without a backward needs.
        options: of torch's constructor.
    """

    def __init__(
        self,
        stages: list[TorchStage],
        microbatches: int,
        loss_fn: Callable[..., Tensor] | None,
        compute: Table,
        both: Table,
        forward: Table,
        **options: Any,
    ) -> None:
        super().__init__(stages, microbatches, loss_fn=loss_fn, **options)  # type: ignore[no-untyped-call]
        self.pipeline_order = compute
        self._prepare_schedule_with_comms(both, format="compute_comms")  # sets stage_index_to_group_rank too
        self._tables = {True: both, False: forward}
        for stage in stages:
            _open_no_connection_to_itself(stage)
            _keep_gradients_without_inputs(stage)

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        if self._has_backward and not self._stages_backward_initialized:
            # The receive buffers that eval has allocated do not require gradients. Torch 2.13 detects that itself.
            self._stages_forward_initialized = False
        self.pipeline_order_with_comms = self._tables[self._has_backward]  # type: ignore[assignment]
        super()._step_microbatches(*args, **kwargs)


def _open_no_connection_to_itself(stage: TorchStage) -> None:
    """Keep a stage from opening a connection to its own rank.

    Torch 2.11 sends a first message between two stages on one rank too. Gloo cannot send a message to its own rank.
    """
    make = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if make is None:  # torch 2.15 sends no first messages
        return

    def ops() -> list[Any]:
        return [op for op in make() if op.group_peer != stage.group_rank]

    stage._get_init_p2p_neighbors_ops = ops  # type: ignore[method-assign]


class _WeightPart(NamedTuple):
    """What is left for W, in the place of what torch's own runtime stores.

    Attributes:
        groups: torch's groups of parameters.
        apart: the arguments of a whole backward pass of the outputs that I has left out; None if there are none.
        results: what the last stage has returned, to be detached after this pass.
    """

    groups: list[dict[str, Any]]
    apart: dict[str, Any] | None
    results: list[Tensor]


def _keep_gradients_without_inputs(stage: TorchStage) -> None:
    """Let W run the whole backward pass of outputs that depend on no input that requires a gradient.

    Torch looks for the parameters of W on the way from the stage's inputs to its outputs. If there is no such way, it
    silently leaves out the gradients of these parameters. With torch 2.13 that happens behind a frozen stage. In torch
    2.11, all values that a stage receives require a gradient. W runs this pass and not I, because torch says at W, and
    not at I, which backward pass is the last. For a first stage, torch does the same.
    """
    run, one_chunk = stage.backward_maybe_with_nosync, stage.backward_one_chunk

    def backward(kind: str, given: dict[str, Any], last_backward: bool = False) -> tuple[Any, Any]:
        if kind == "input":
            joined, apart = _divided(given)
            found: tuple[Any, Any] = (tuple(None for _ in given["input_values"]), [])
            if joined is not None:
                found = run(kind, joined, last_backward=last_backward)
            return found[0], _WeightPart(found[1], apart, [])
        if kind != "weight":
            return run(kind, given, last_backward=last_backward)
        groups, apart, results = given["param_groups"]
        if groups:
            without = [each for each in stage.submod.parameters() if each.requires_grad and each.grad is None]
            run(kind, {**given, "param_groups": groups}, last_backward=last_backward and apart is None)
            _give_memory_of_their_own(without)
        if apart is not None:
            run("full", apart, last_backward=last_backward)
        _detach(results)
        return (), None

    def backward_one_chunk(bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **options: Any) -> None:
        if full_backward or not stage.is_last or stage.is_first or stage.dw_builder or not stage.has_backward:
            one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, **options)
            return
        # Torch detaches the results in place, after which a pass of W could not go through them.
        results = _taken_results(stage, bwd_chunk_id)
        one_chunk(bwd_chunk_id, loss=loss, full_backward=False, **options)
        part = stage.backward_state[bwd_chunk_id][1]
        if part.apart is None:
            _detach(results)
        else:
            part.results.extend([*results, loss])

    stage.backward_maybe_with_nosync = backward  # type: ignore[method-assign, assignment]
    stage.backward_one_chunk = backward_one_chunk  # type: ignore[method-assign, assignment]


def _taken_results(stage: TorchStage, microbatch: int) -> tuple[Tensor, ...]:
    """Return what a stage has kept of its forward of a microbatch, and let it forget that."""
    if hasattr(stage, "fwd_cache"):
        results, inputs = stage.fwd_cache[microbatch]
        stage.fwd_cache[microbatch] = (), inputs
        return tuple(results)
    state = stage._forward_chunk_states[microbatch]  # type: ignore[attr-defined] # since torch 2.15
    results = tuple(state.live_outputs)
    state.live_outputs, state.output_grad_edges = [], ()
    return results


def _give_memory_of_their_own(parameters: Iterable[nn.Parameter]) -> None:
    """Copy the first gradients that W has stored.

    Autograd may return a tensor that is also something else: the gradient of another parameter (both are those of the
    sum in ``x + p + q``), or a message. It may also be an expanded one (of ``p.sum()``). Torch stores it as it is, and
    later passes of W add to it in place, so that two parameters would have the sum of both gradients.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def _detach(results: Iterable[Tensor]) -> None:
    """Detach tensors in place, as torch does with what the last stage returns. Views cannot be detached so."""
    for result in results:
        if not result._is_view():
            result.detach_()


def _divided(given: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Divide the arguments of a backward pass: outputs that depend on an input that requires a gradient, and others.

    Outputs that require no gradient themselves are left out. None stands for no outputs. Since torch 2.15, an output
    that was sent is None, or its edge in the graph if it requires a gradient.
    """
    outputs, gradients = given["stage_output"], given["output_grads"]
    values = tree_leaves(given["input_values"])
    inputs = {get_gradient_edge(each).node for each in values if isinstance(each, Tensor) and each.requires_grad}
    parts: dict[bool, list[int]] = {True: [], False: []}
    for index, output in enumerate(outputs):
        edge = get_gradient_edge(output) if isinstance(output, Tensor) and output.requires_grad else output
        if isinstance(edge, GradientEdge):
            parts[_depends(edge.node, inputs)].append(index)

    def chosen(indices: list[int]) -> dict[str, Any] | None:
        if not indices:
            return None
        grads = None if gradients is None else tuple(gradients[index] for index in indices)
        return {**given, "stage_output": tuple(outputs[index] for index in indices), "output_grads": grads}

    joined, apart = chosen(parts[True]), chosen(parts[False])
    if apart is not None and gradients is None:
        (apart["stage_output"],) = apart["stage_output"]  # the loss, without gradients: a whole pass takes no tuple
    return joined, apart


def _depends(node: Node, inputs: Collection[Node]) -> bool:
    """True if one of these inputs is the node itself or before it in its graph."""
    waiting = [node] if inputs else []
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node in inputs:
            return True
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        waiting.extend(following)
    return False
