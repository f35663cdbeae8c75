"""One stage of a pipeline: a module, and the state that its microbatches keep between forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ._torch import shares_memory, tree_flatten, tree_unflatten
from .backward import WeightPart, backward, backward_input, given_gradients
from .sharded import DataParallel


@dataclass
class _Microbatch:
    """The state that a stage keeps for one microbatch."""

    inputs: list[Tensor | None]
    """For every positional argument, the leaf that receives its gradient; None if the argument needs no gradient."""
    outputs: list[Tensor] = field(default_factory=list)
    rest: WeightPart | None = None
    """The weight part of the backward pass, once the input part has run."""


class _Enter(torch.autograd.Function):
    """Turns a leaf into a value that is not a leaf, so that the module may change it in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


_enter: Callable[[Tensor], Tensor] = _Enter.apply


class Stage:
    """A module that is one stage of a pipeline.

    Args:
        module: a module that accepts tensors and returns a tensor or a tuple of tensors.
        index: the number of the stage in the pipeline, counted from 0.
    """

    def __init__(self, module: nn.Module, index: int) -> None:
        self.module = module
        self.index = index
        self._kept: dict[int, _Microbatch] = {}

    def forward(self, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, keep: bool = True) -> Any:
        """Run the module on one microbatch, and return ``module(*args, **kwargs)`` unchanged.

        The graph begins at the arguments. The backward methods return the gradients of the arguments, and do not pass
        them on to what the arguments were computed from.

        Args:
            microbatch: the number of the microbatch, by which the backward methods find it.
            args, kwargs: the arguments of the module.
            keep: True keeps what the backward pass needs. False runs the module without gradients.

        Raises:
            RuntimeError: the microbatch ran already, and its backward pass has not run yet.
        """
        self._parallel.wait()
        if not keep:
            with torch.no_grad():
                return self.module(*args, **kwargs)
        if microbatch in self._kept:
            raise RuntimeError(
                f"stage {self.index} ran the forward pass of microbatch {microbatch} already and still waits for its "
                "backward pass; after a step that failed, call clear()"
            )
        values, spec = tree_flatten(args)
        inputs = [
            value.detach().requires_grad_() if isinstance(value, Tensor) and value.requires_grad else None
            for value in values
        ]
        entered = [value if leaf is None else _enter(leaf) for value, leaf in zip(values, inputs, strict=True)]
        returned = self.module(*tree_unflatten(entered, spec), **kwargs)
        outputs = [value for value in tree_flatten(returned)[0] if isinstance(value, Tensor)]
        self._kept[microbatch] = _Microbatch(inputs, outputs)
        return returned

    def replace_outputs(self, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """Let the backward pass start from other tensors that were computed from the outputs, such as the loss."""
        self._waiting(microbatch).outputs = list(outputs)

    def backward(self, microbatch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Run the whole backward pass of a microbatch. Gradients of parameters are added to their ``.grad``.

        Args:
            microbatch: the number of the microbatch.
            gradients: one gradient for each output; None if the output has none.

        Returns:
            The gradient of each positional argument; None if the argument needs none.

        Raises:
            RuntimeError: the microbatch has no backward pass to run.
            ValueError: there is not one gradient for each output.
        """
        kept = self._waiting(microbatch)
        given = self._given(kept, gradients)
        del self._kept[microbatch]
        kept.outputs = []
        self._parallel.wait()
        backward(given)
        self._parallel.accumulate()
        return _take_gradients(kept)

    def backward_input(self, microbatch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Run the part of the backward pass that the previous stages wait for; see `backward`.

        Run `backward_weight` for the same microbatch later.
        """
        kept = self._waiting(microbatch)
        given = self._given(kept, gradients)
        self._parallel.wait()
        kept.rest = backward_input(given, [leaf for leaf in kept.inputs if leaf is not None])
        kept.outputs = []
        return _take_gradients(kept)

    def backward_weight(self, microbatch: int) -> None:
        """Run the rest of the backward pass: add the gradients of the parameters to their ``.grad``.

        Raises:
            RuntimeError: `backward_input` has not run for this microbatch.
        """
        kept = self._kept.get(microbatch)
        if kept is None or kept.rest is None:
            raise RuntimeError(
                f"stage {self.index} cannot run the weight part of microbatch {microbatch}: its input part comes first"
            )
        del self._kept[microbatch]
        self._parallel.wait()
        kept.rest.run()
        self._parallel.accumulate()

    def begin(self) -> None:
        """Begin a step: note which modules FSDP and DDP drive. Since the last step, the module may have been sharded or
        wrapped.
        """
        self._parallel = DataParallel(self.module)

    def unshard(self) -> None:
        """Start to gather the parameters that FSDP has sharded. Without FSDP, do nothing."""
        self._parallel.unshard()

    def reshard(self) -> None:
        """Free the parameters that FSDP has gathered. Without FSDP, do nothing."""
        self._parallel.reshard()

    def reduce_grad(self) -> None:
        """Reduce the gradients of all microbatches over the data-parallel ranks. Without FSDP and DDP, do nothing."""
        self._parallel.reduce()

    def clear(self) -> None:
        """Drop the state of all microbatches, after a step that failed."""
        self._kept.clear()
        if "_parallel" in vars(self):  # or else nothing has run; it may be its creation that failed
            self._parallel.clear()

    @cached_property
    def _parallel(self) -> DataParallel:
        return DataParallel(self.module)

    def _waiting(self, microbatch: int) -> _Microbatch:
        kept = self._kept.get(microbatch)
        if kept is None or kept.rest is not None:
            what = "no forward pass was run for it" if kept is None else "it was run already"
            raise RuntimeError(f"stage {self.index} has no backward pass to run for microbatch {microbatch}: {what}")
        return kept

    def _given(self, kept: _Microbatch, gradients: Sequence[Tensor | None]) -> Any:
        if len(gradients) != len(kept.outputs):
            raise ValueError(
                f"stage {self.index} has {len(kept.outputs)} outputs and got {len(gradients)} gradients: give one for "
                "each output, None where there is none"
            )
        return given_gradients(kept.outputs, gradients)


def _take_gradients(kept: _Microbatch) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments, and drop them from the kept state.

    A gradient may share memory with the ``.grad`` of a parameter, if both are views of one tensor. The next microbatch
    adds to the latter, perhaps before the previous stage uses this gradient, so it is copied.
    """
    inputs, kept.inputs = kept.inputs, []
    found: list[Tensor | None] = []
    for leaf in inputs:
        gradient = None if leaf is None else leaf.grad
        found.append(gradient.clone() if gradient is not None and shares_memory(gradient) else gradient)
        if leaf is not None:
            leaf.grad = None  # the graph, which holds the leaf, lives until the weight part
    return tuple(found)
