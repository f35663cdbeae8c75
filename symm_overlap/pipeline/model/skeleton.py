"""A copy of a model without memory: its parameters and buffers are fake tensors.

The tracer runs this copy, so no rank needs the parameters of other stages. Later changes to the real modules (FSDP,
hooks, another device) do not affect it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ._torch import FakeTensorMode
from .closures import rebind
from .memory import sharing

_NOT_COPIED = (dist.ProcessGroup, DeviceMesh)


class Skeleton:
    """The copy of a model, and the mode of its fake tensors.

    Args:
        device: where the real parameters will be; the fake tensors report this device.

    Attributes:
        model: the copy. Tied parameters are tied in it too.
        mode: the mode in which fake tensors are created.
        sharing: for each parameter and buffer of the model itself, the names of those that share its memory.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.sharing = sharing(model)
        # deepcopy does not copy what it finds in its memo: here the tensors, and objects that belong to the process.
        memo: dict[int, Any] = {}
        for tensor in [*model.parameters(), *model.buffers()]:
            memo[id(tensor)] = self._fake_of(tensor, device)
        for module in model.modules():
            for value in vars(module).values():
                if isinstance(value, _NOT_COPIED):
                    memo[id(value)] = value
                elif isinstance(value, Tensor) and not value.is_leaf:  # computed anew in each forward, as by pruning
                    memo[id(value)] = value.detach().clone()
        self.model: nn.Module = copy.deepcopy(model, memo)
        rebind(self.model, memo)

    def fake(self, tensor: Tensor) -> Tensor:
        """Return a new fake tensor like ``tensor``. Equal arguments get different fakes, since they may differ
        later."""
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def _fake_of(self, tensor: Tensor, device: torch.device) -> Tensor:
        with self.mode, torch.inference_mode(False):
            fake = torch.empty_like(tensor, device=device, requires_grad=False)
            return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
