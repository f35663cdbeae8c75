"""``symm_overlap.fsdp.apply``: FSDP2's communication through symmetric memory, for the modules of a model."""

from __future__ import annotations

import warnings
from collections import defaultdict

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...runtime import TRAITS
from ...settings import current
from .._torch import (
    buffers_of_reductions,
    bytes_of,
    groups_of,
    groups_of_gathers,
    prefetch_depth,
    reduces_in,
    state_of,
)
from .memory import GATHER, REDUCE, Memory
from .torch_protocol import SlotAllGather, SlotReduceScatter


def apply(model: nn.Module, *, slots: int | None = None) -> None:
    """Let FSDP2 gather parameters and reduce gradients through symmetric memory, in every ``fully_shard`` module.

    Equivalent, but for the order in which gradients are added, to what torch does without it::

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(...)
                module.set_custom_reduce_scatter(...)

    All-gathers are done in place, by copies out of the peers' memory, which a GPU does without a multiprocessor.
    Reduce-scatters add in rank order, in float32 or wider, so that all runs give the same bits. The modules share the
    memory for it, which is made here and freed with the model.

    Modules are left to torch, and a warning says which and why, where there are no peers, where ranks cannot reach each
    other's memory, where ``force_path("c10d")`` is set, and where a module has several groups of parameters. With
    hybrid sharding the all-reduce is torch's.

    Call it on every rank, in the same order for all models of a group, before or between steps. To call it again makes
    new memory for the modules of ``model``.

    Args:
        model: has modules to which `torch.distributed.fsdp.fully_shard` has been applied, or is one.
        slots: how many outputs of all-gathers there is memory for, at least 2. By default two, and one for each module
            that a module prefetches by now, or that torch does by itself on devices with streams. If more are alive in
            a step, more are made in that step, on all ranks.

    Raises:
        ValueError: no module of the model is sharded by ``fully_shard``, or ``slots`` is below 2.
        RuntimeError: there is no room, on this rank or (`torch.distributed.DistBackendError`) on another.
    """
    if slots is not None and slots < 2:
        raise ValueError(f"apply: slots is {slots}; allowed are 2 and more")
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError("apply: no module of the model is sharded: call torch.distributed.fsdp.fully_shard first")
    left: defaultdict[str, list[str]] = defaultdict(list)
    memory = Memory(current(), slots or 2 + _ahead([module for _, module in modules]))
    for name, module in modules:
        for why in _set(module, memory):
            left[why].append(name or type(module).__name__)
    memory.reserve()
    for why, names in left.items():
        warnings.warn(f"symm_overlap.fsdp.apply leaves {', '.join(names)} to torch: {why}", stacklevel=2)


def _ahead(modules: list[FSDPModule]) -> int:
    """How many modules are gathered ahead. Where copies have streams, torch gathers one even if nobody says so."""
    traits = {TRAITS.get(params.device.type) for module in modules for params in groups_of(state_of(module))}
    implicit = any(each is not None and each.copy_stream for each in traits)
    return max(int(implicit), *map(prefetch_depth, modules))


def _set(module: FSDPModule, memory: Memory) -> list[str]:
    """Set the communication of a module; return why some of it is left to torch, if it is."""
    groups = groups_of(state_of(module))
    if not groups:  # all of its parameters are in modules that are sharded on their own
        return []
    if len(groups) > 1:
        return ["it has several groups of parameters, for which torch takes no custom communication"]
    (params,) = groups
    gathers = groups_of_gathers(params)
    if not gathers:
        return ["its parameters are replicated, not sharded"]
    gathered, reduced = bytes_of(params)
    device, buffers = params.device, buffers_of_reductions(params)
    whys = [memory.require(GATHER, group, device, gathered) for group in gathers]
    whys.append(memory.require(REDUCE, reduces_in(params), device, reduced, 1 + buffers))
    module.set_custom_all_gather(SlotAllGather(params, memory))
    module.set_custom_reduce_scatter(SlotReduceScatter(params, memory))
    return sorted({why for why in whys if why})
