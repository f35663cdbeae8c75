"""Layers that take a known time, and collectives that take a known time although no other rank exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.fsdp.in_backward import InBackward

Sleep = Callable[[float], None]


class _Sleeps(nn.Module):
    """A layer whose backward takes twice as long as its forward."""

    def __init__(self, sleep: Sleep, time: float) -> None:
        super().__init__()
        self.weight, self.sleep, self.time = nn.Parameter(torch.ones(64)), sleep, time

    def forward(self, x: Tensor) -> Tensor:
        self.sleep(self.time)
        return InBackward.apply(x * self.weight, partial(self.sleep, 2 * self.time))  # type: ignore[no-any-return]


class _Gather:
    def __init__(self, sleep: Sleep, time: float) -> None:
        self.sleep, self.time = sleep, time

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self.sleep(self.time)
        own = output_tensor.chunk(group.size())[group.rank()]
        for part in output_tensor.chunk(group.size()):
            if part.data_ptr() != own.data_ptr():
                part.copy_(input_tensor)


class _Reduce(_Gather):
    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self.sleep(self.time)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


@contextmanager
def sleeping(device: str, sleep: Sleep, compute: float, gather: float, layers: int) -> Iterator[Any]:
    """Yield a model of sleeping layers that is sharded over two ranks. The other rank does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    try:
        mesh = init_device_mesh(device, (2,))
        model: Any = nn.Sequential(*(_Sleeps(sleep, compute) for _ in range(layers))).to(device)
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            layer.set_custom_all_gather(_Gather(sleep, gather))
            layer.set_custom_reduce_scatter(_Reduce(sleep, gather))
        yield model
    finally:
        dist.destroy_process_group()
