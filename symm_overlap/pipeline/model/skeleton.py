"""A copy of a model without memory: its parameters and buffers are fake tensors.

The tracer runs this copy, so no rank needs the parameters of other stages. Later changes to the real modules (FSDP,
hooks, another device) do not affect it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ._torch import FakeTensorMode, allow_operators, forbid_operators
from .closures import rebind
from .memory import sharing
from .model_copy import copied

_KEPT = (
    "a layer uses a tensor without values, which its code has kept since the model was traced, outside of its module, "
    "in a global dict for example. Compute such tensors in __init__ and keep them in buffers, call the model once "
    "before the pipeline is built, so that they have values, or cut without tracing (trace=False)"
)


class Skeleton:
    """The copy of a model, and the mode of its fake tensors.

    Args:
        device: where the real parameters will be; the fake tensors report this device.

    Attributes:
        model: the copy. Tied parameters are tied in it too.
        mode: the mode in which fake tensors are created.
        modes: all modes in which the copy runs, such as those of torch.export; empty if it is not in use.
        sharing: for each parameter and buffer of the model itself, the names of those that share its memory.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.modes: set[FakeTensorMode] = set()
        self.sharing = sharing(model)
        fakes = {id(each): self._fake_of(each, device) for each in (*model.parameters(), *model.buffers())}
        self.model, copies = copied(model, fakes)
        rebind(self.model, copies)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A context in which the copy may run. Afterwards operators refuse the fake tensors that code has kept: they
        must not get into steps, which compute with values.
        """
        self.modes.add(self.mode)
        allow_operators(self.mode)
        try:
            yield
        finally:
            while self.modes:
                forbid_operators(self.modes.pop(), _KEPT)

    def fake(self, tensor: Tensor) -> Tensor:
        """Return a new fake tensor like ``tensor``. Equal arguments get different fakes, since they may differ
        later."""
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def _fake_of(self, tensor: Tensor, device: torch.device) -> Tensor:
        with self.mode, torch.inference_mode(False):
            fake = torch.empty_like(tensor, device=device, requires_grad=False)
            return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
