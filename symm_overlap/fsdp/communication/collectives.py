"""All-gather and reduce-scatter of flat tensors through a ring of slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...collective.exchange.route import digest_of
from ...collective.sum_dtypes import sent_in
from ...plan import Region, Step
from ...runtime import Operand, Part, Sum, Work
from .planners import gather_in_slot, reduce_in_slot
from .slots import Bound, Slots

SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes that reduce-scatters accept. All-gathers accept any."""


def all_gather(slots: Slots, output: Tensor, input: Tensor, caller: int = 0) -> Any:
    """All-gather flat tensors: copy the peers' shards straight into ``output``.

    Equivalent to ``torch.distributed.all_gather_into_tensor(output, input)``.

    Args:
        slots: the slots of all-gathers.
        output: (world * n,), contiguous, of any dtype. Memory from `Slots.allocate` is filled in place. Any other
            memory costs an extra copy of this rank's own shard into a slot, where peers can read it.
        input: (n,), of the same dtype. It may be this rank's part of ``output``.
        caller: a number that identifies the caller. If ranks disagree on it, the call fails on every rank.

    Returns:
        The event after the call, or None if the device has no events.

    Raises:
        ValueError: shapes or dtypes do not fit each other; the call then fails on every rank.
    """
    world, numel = slots.world, input.numel()
    if output.numel() == 0 and numel == 0:
        return None
    outside = not slots.holds(output)
    # Keeps the slot in use until the call is issued.
    own = slots.allocate((world * numel,), input.dtype) if outside else None
    plan = gather_in_slot(slots.rank, world, slots.slot, outside=outside)

    def bind() -> Bound:
        _require_fitting(output, input, "output", "input", world)
        tensors = {"input": input.view(-1), **({"output": output.view(-1)} if outside else {})}
        at = _found(slots, tensors, numel, input.dtype)
        return Bound(at, tensors, (numel, input.dtype, outside), lambda step: None, {})

    digest = digest_of(slots.op, caller, slots.slot, slots.count, slots.nbytes, numel, input.dtype)
    event = slots.call(digest, [output], plan, bind)
    del own
    return event


def reduce_scatter(slots: Slots, output: Tensor, input: Tensor, op: Any, caller: int = 0) -> Any:
    """Reduce-scatter flat tensors: sum in rank order, in float32 or wider.

    Equivalent to ``torch.distributed.reduce_scatter_tensor(output, input.to(output.dtype), op)``.

    Args:
        slots: the slots of reduce-scatters.
        output: (n,), contiguous; float32, float64, bfloat16 or float16.
        input: (world * n,), of the same dtype, or bfloat16 or float16 if ``output`` is float32. Memory from
            `Slots.allocate` is read in place. Any other memory is copied into a slot first.
        op: ``ReduceOp.SUM``, ``AVG``, or ``PREMUL_SUM(factor)``. For the latter, the sum is multiplied instead of the
            inputs. The results differ by rounding only, unless the sum overflows: float16 is therefore rejected.
        caller: see `all_gather`.

    Returns:
        The event after the call, or None if the device has no events.

    Raises:
        ValueError, TypeError: shapes, dtypes or the op do not fit; the call then fails on every rank.
    """
    world, numel = slots.world, output.numel()
    if input.numel() == 0 and numel == 0:
        return None
    own = None if slots.holds(input) else slots.allocate((world * numel,), input.dtype)
    in_place = slots.backend.traits.in_place
    plan = reduce_in_slot(slots.rank, world, slots.slot, in_place=in_place)
    stage = None if in_place else input.new_empty(world * numel)

    def bind() -> Bound:
        _require_fitting(input, output, "input", "output", world, widens=True)
        average, factor = _meaning(op, output.dtype)
        tensors = {"input": input.view(-1), "output": output.view(-1), **({} if stage is None else {"stage": stage})}
        at = _found(slots, tensors, numel, input.dtype)

        def operand(region: Region) -> Operand:
            return at(region) if region.buffer == "slots" else Part(tensors[region.buffer], at(region))

        def work(step: Step) -> list[Work] | None:
            if factor is not None:
                return None
            return [Sum([operand(region) for region in step.reads], average, tensors["output"])]

        def reduce(step: Step) -> None:
            slots.backend.sum([at(region) for region in step.reads], average, tensors["output"])
            if factor is not None:
                output.mul_(factor)

        variant = numel, input.dtype, output.dtype, average, factor is None
        return Bound(at, tensors, variant, work, {"reduce": reduce})

    words = slots.op, caller, slots.slot, slots.count, slots.nbytes, numel, input.dtype, output.dtype
    event = slots.call(digest_of(*words, *_in_words(op)), [output], plan, bind)
    del own
    return event


def _require_fitting(
    large: Tensor, small: Tensor, name_of_large: str, name_of_small: str, world: int, widens: bool = False
) -> None:
    """Raise ValueError unless two tensors fit each other. ``widens``: whether the small one may be the float32 sum of
    bfloat16 or float16.
    """
    sent = sent_in(large.dtype, small.dtype) if widens else small.dtype
    fits = large.numel() == world * small.numel() and large.dtype == sent
    if not fits or large.device != small.device or not (large.is_contiguous() and small.is_contiguous()):
        raise ValueError(
            f"{name_of_large} of {large.dtype}, shape {tuple(large.shape)}, strides {large.stride()} on {large.device} "
            f"and {name_of_small} of {small.dtype}, shape {tuple(small.shape)}, strides {small.stride()} on "
            f"{small.device}: both must be contiguous, on one device, of one dtype"
            f"{' (or float32 for sums of bfloat16 or float16)' if widens else ''}, and {name_of_large} {world} times "
            f"as large as {name_of_small}"
        )


def _in_words(op: Any) -> tuple[str, float | None]:
    """Return the name of a reduction, and its factor if it has one."""
    kind, factor = op.__getstate__() if type(op) is dist.ReduceOp else (op, None)  # type: ignore[attr-defined]
    return str(getattr(kind, "name", kind)), factor


def _found(slots: Slots, tensors: Mapping[str, Tensor], numel: int, dtype: torch.dtype) -> Callable[[Region], Tensor]:
    """Return what finds a region, in units of ``numel`` elements: in the slots, or in one of ``tensors``."""

    def at(region: Region) -> Tensor:
        if region.buffer == "slots":
            return slots.part(region, numel, dtype)
        return tensors[region.buffer][region.start * numel : region.stop * numel]

    return at


def _meaning(op: Any, dtype: torch.dtype) -> tuple[bool, float | None]:
    """Return whether to average, and the factor to multiply the sum by."""
    name, factor = _in_words(op)
    if dtype not in SUMMED:
        allowed = ", ".join(str(each).removeprefix("torch.") for each in SUMMED)
        raise TypeError(f"a reduce-scatter of {dtype}: allowed are {allowed}")
    if name == "PREMUL_SUM" and dtype != torch.float16 and isinstance(factor, float):
        return False, factor
    if name not in ("SUM", "AVG"):
        raise ValueError(
            f"a reduce-scatter with {name} of {dtype}: allowed are SUM, AVG and, except for float16, PREMUL_SUM with a "
            "number as its factor"
        )
    return name == "AVG", None
