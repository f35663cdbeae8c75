"""Models whose layers log what they compute, and a log of what torch's FSDP2 really issues around that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.fsdp.in_backward import InBackward
from tests.ranks import Rank

Log = list[tuple[str, str]]


class Block(nn.Module):
    """Two linear layers with the width ``inner`` between them. The block logs when it computes. If ``inner`` is 0, the
    block only adds a bias, whose value the backward does not need."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(width, inner), nn.Linear(inner, width)) if inner else (None, None)
        self.bias = nn.Parameter(torch.ones(width))
        self.log: Log = []
        self.name = ""

    def forward(self, x: Tensor) -> Tensor:
        recomputed = torch._C._current_graph_task_id() != -1  # in a backward, so it is logged as a part of that
        self.log.append(("backward" if recomputed else "forward", self.name))
        note = partial(self.log.append, ("backward", self.name))
        if self.up is None or self.down is None:
            return InBackward.apply(x + self.bias, note)
        return x + InBackward.apply(self.down(torch.tanh(self.up(x))) + self.bias, note)


class Model(nn.Module):
    """Blocks that run in any order. With ``ends``, the root also has layers of its own."""

    def __init__(self, inner: Sequence[int] = (8, 8, 8, 8), ends: bool = False, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, each) for each in inner)
        self.first, self.last = (nn.Linear(width, width) if ends else nn.Identity() for _ in range(2))
        self.order: Sequence[int] = range(len(inner))
        self.recomputes = False  # whether blocks use activation checkpointing
        self.by_hand: Sequence[int] = ()  # blocks that are gathered by an explicit call
        for index, block in enumerate(self.blocks):
            block.name = f"L{index}"

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.by_hand:
            self.blocks[index].unshard()  # type: ignore[operator]
        for index in self.order:
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.last(x)


def built(seed: int = 0, **options: Any) -> Model:
    """Return the same model on every rank, in float64."""
    torch.manual_seed(seed)
    return Model(**options).double()


def sharded(me: Rank, model: Model, keep: Sequence[int] = ()) -> Model:
    """Apply FSDP2 to every block and to the model. The blocks in ``keep`` are not resharded after the forward."""
    mesh = DeviceMesh.from_group(me.group, me.device.type)
    for index, block in enumerate(model.blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=index not in keep)
    return fully_shard(model, mesh=mesh)


def data(me: Rank, step: int, rows: int = 2, width: int = 8) -> Tensor:
    """Return the batch of a rank in a step."""
    generator = torch.Generator().manual_seed(100 * step + me.rank)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


class _Noted:
    """A collective that logs when it is called."""

    def __init__(self, inner: Any, log: Log, entry: tuple[str, str]) -> None:
        self._inner, self._log, self._entry = inner, log, entry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._log.append(self._entry)
        return self._inner(*args, **kwargs)


def groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


@contextmanager
def logged(model: Model) -> Iterator[Log]:
    """Log each gather, copy-out, forward, reshard, backward and reduce-scatter in the body, with the block's name."""
    log: Log = []
    undo = []
    for module, name in [(model, "root"), *((block, block.name) for block in model.blocks)]:
        module.log = log
        if not hasattr(module, "_get_fsdp_state"):
            continue
        for group in groups(module):
            before = dict(vars(group))
            undo.append((group, before))
            group._all_gather_comm = _Noted(group._all_gather_comm, log, ("gather", name))
            group._reduce_scatter_comm = _Noted(group._reduce_scatter_comm, log, ("reduce-scatter", name))
            group.wait_for_unshard = _noting(
                group.wait_for_unshard, log, ("copy-out", name), lambda group=group: group._all_gather_result
            )
            group._to_sharded = _noting(
                group._to_sharded, log, ("reshard", name), lambda group=group: group.is_unsharded or None
            )
    try:
        yield log
    finally:
        for group, before in undo:
            for name in ("_all_gather_comm", "_reduce_scatter_comm"):
                setattr(group, name, before[name])
            for name in ("wait_for_unshard", "_to_sharded"):
                delattr(group, name)
                if name in before:
                    setattr(group, name, before[name])


def _noting(method: Any, log: Log, entry: tuple[str, str], happens: Any) -> Any:
    def run() -> None:
        if happens() is not None:
            log.append(entry)
        method()

    return run
