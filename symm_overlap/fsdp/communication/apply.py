"""``symm_overlap.fsdp.apply``: FSDP2's communication through symmetric memory, for the modules of a model."""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import replace
from typing import TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...runtime import TRAITS
from ...settings import current
from .._torch import buffers_of_reductions, groups_of, groups_of_gathers, prefetch_depth, reduces_in, state_of
from ._torch import bytes_of, reduce_dtypes
from .collectives import SUMMED
from .memory import GATHER, REDUCE, Memory
from .torch_protocol import SlotAllGather, SlotReduceScatter

Model = TypeVar("Model", bound=nn.Module)


def apply(model: Model, *, slots: int | None = None, half_gradients: bool = True) -> Model:
    """Let FSDP2 gather parameters and reduce gradients through symmetric memory, in every ``fully_shard`` module.

    Equivalent to FSDP2 without it, except for the order in which gradients are added. It sets ::

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(...)
                module.set_custom_reduce_scatter(...)

    All-gathers are done in place, by copies from the peers' memory, which use no multiprocessor of a GPU.
    Reduce-scatters add in rank order, in float32 or wider, so that all runs give the same bits. The modules share the
    memory for this. It is allocated here and freed with the model.

    Some modules are left to torch, and a warning says which and why, for example if there are no peers, if ranks cannot
    access each other's memory, if ``force_path("c10d")`` is set, or if a module has several parameter groups. With
    hybrid sharding, the all-reduce is torch's.

    Call it on every rank, in the same order for all models of a group, before or between steps. Calling it again
    allocates new memory for the modules of ``model``.

    Args:
        model: a module to which `torch.distributed.fsdp.fully_shard` was applied, or one that contains such modules.
        slots: for how many outputs of all-gathers memory is reserved, at least 2. The default is two plus the largest
            number of modules that a module is set to prefetch. On devices with streams it is at least three, since
            torch prefetches one module by default. If more outputs are alive in a step, all ranks allocate more in that
            step.
        half_gradients: whether gradients in bfloat16 or float16 that are reduced in float32 are sent as they are, which
            changes no bit. Set it to False if ranks run different numbers of backward passes before they reduce.

    Returns:
        The model.

    Raises:
        ValueError: no module of the model is sharded by ``fully_shard``, or ``slots`` is below 2.
        RuntimeError: memory runs out on this rank or (`torch.distributed.DistBackendError`) on another.
    """
    if slots is not None and slots < 2:
        raise ValueError(f"apply: slots is {slots}; allowed are 2 and more")
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError("apply: no module of the model is sharded: call torch.distributed.fsdp.fully_shard first")
    left: defaultdict[str, list[str]] = defaultdict(list)
    kept = replace(current(), timeout=None)  # a block around this call limits the waits in it, not those of later steps
    memory = Memory(kept, slots or 2 + _ahead([module for _, module in modules]))
    for name, module in modules:
        for why in _set(module, memory, half_gradients):
            left[why].append(name or type(module).__name__)
    memory.reserve()
    for why, names in left.items():
        warnings.warn(f"symm_overlap.fsdp.apply leaves {', '.join(names)} to torch: {why}", stacklevel=2)
    return model


def _ahead(modules: list[FSDPModule]) -> int:
    """Return how many modules are gathered ahead. On devices with copy streams, torch gathers one ahead by default."""
    traits = {TRAITS.get(params.device.type) for module in modules for params in groups_of(state_of(module))}
    implicit = any(each is not None and each.copy_stream for each in traits)
    return max(int(implicit), *map(prefetch_depth, modules))


def _set(module: FSDPModule, memory: Memory, half_gradients: bool) -> list[str]:
    """Set the communication of a module. Return the reasons why some of it is left to torch, if any."""
    groups = groups_of(state_of(module))
    if not groups:  # all of its parameters are in inner modules that are sharded on their own
        return []
    if len(groups) > 1:
        return ["it has several groups of parameters, for which torch supports no custom communication"]
    (params,) = groups
    gathers = groups_of_gathers(params)
    if not gathers:
        return ["its parameters are replicated, not sharded"]
    gathered, reduced = bytes_of(params, half_gradients)
    device, buffers = params.device, buffers_of_reductions(params)
    whys = [memory.require(GATHER, group, device, gathered) for group in gathers]
    module.set_custom_all_gather(SlotAllGather(params, memory))
    if others := reduce_dtypes(params).difference(SUMMED):
        whys.append(f"its gradients are reduced in {', '.join(map(str, sorted(others, key=str)))}")
    else:
        whys.append(memory.require(REDUCE, reduces_in(params), device, reduced, 1 + buffers))
        module.set_custom_reduce_scatter(SlotReduceScatter(params, memory, half_gradients))
    return sorted({why for why in whys if why})
