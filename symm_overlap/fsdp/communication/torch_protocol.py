"""Communication through slots, as objects for FSDP2's ``set_custom_all_gather`` and ``set_custom_reduce_scatter``.

FSDP2 asks such an object for memory, fills the memory, and calls the object. Groups without slots are left to
torch.distributed, as FSDP2 does by default.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._torch import all_gather_single, reduce_scatter_single
from ...collective.sum_dtypes import sent_in
from .._torch import AllGather, ParamGroup, ReduceScatter, gathers_in, reduces_in
from . import collectives
from ._torch import announce_gradients
from .memory import GATHER, REDUCE, Memory
from .slots import Slots


class SlotAllGather(AllGather):
    """The all-gathers of one parameter group, in slots.

    Args:
        params: torch's parameter group. It owns this object, so this object holds only a weak reference to it.
        memory: has the slots, or knows that a group has none.
    """

    def __init__(self, params: ParamGroup, memory: Memory) -> None:
        self._params, self._memory, self._number = weakref.ref(params), memory, memory.number()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the gathered parameters. The caller fills this rank's part of it."""
        shape, slots = tuple(map(int, size)), self._memory.slots(GATHER, gathers_in(self._params()), device)
        if slots is None or prod(shape) == 0:
            return torch.empty(shape, dtype=dtype, device=device)
        return slots.allocate(shape, dtype)

    def reserve(self, ahead: int) -> None:
        """Reserve slots for this many gathers ahead. Collective."""
        slots = self._slots()
        if slots is not None:
            slots.reserve(2 + ahead, slots.nbytes)

    def own_order(self) -> bool:
        """True if gathers have slots and so wait for no other collective."""
        return self._slots() is not None

    def _slots(self) -> Slots | None:
        params = self._params()
        assert params is not None
        return self._memory.slots(GATHER, gathers_in(params), params.device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """See `symm_overlap.fsdp.communication.collectives.all_gather`."""
        slots = self._memory.slots(GATHER, group, output_tensor.device)
        if slots is None:
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        if not async_op:
            collectives.all_gather(slots, output_tensor, input_tensor, self._number)
            return None
        # FSDP2 calls on the stream that computes. It expects that the collective has a stream of its own, as with NCCL.
        with slots.beside(output_tensor, input_tensor):
            return Issued(collectives.all_gather(slots, output_tensor, input_tensor, self._number))


class SlotReduceScatter(ReduceScatter):
    """The reduce-scatters of one parameter group, whose inputs are in slots.

    FSDP2 casts gradients to the dtype in which they are reduced, and sends them in it. Gradients in half precision that
    are reduced in float32 are sent as they are here, and their sum is float32. Its bits are the same, because it is
    computed in float32, and half of the bytes are sent.

    Args:
        params, memory: see `SlotAllGather`.
        half_gradients: see `symm_overlap.fsdp.apply`.
    """

    def __init__(self, params: ParamGroup, memory: Memory, half_gradients: bool = True) -> None:
        self._params, self._memory, self._number = weakref.ref(params), memory, memory.number()
        self._input: tuple[int, torch.dtype] | None = None  # for which the last slot was handed out
        self._half_gradients = half_gradients
        self._dtype: torch.dtype | None = None  # that of all gradients, if it is known
        before = getattr(params, "_reduce_scatter_comm", None)
        # Whether the last backward pass did not reduce.
        self._adds_up: bool = isinstance(before, SlotReduceScatter) and before._adds_up
        announce_gradients(params)

    def expect(self, dtypes: set[torch.dtype], reduces: bool) -> None:
        """Note the dtypes of the gradients, before they are reduced, or not.

        All ranks have to send the same dtype. Gradients of several backward passes are added up in the dtype of the
        reduction, but maybe only on some ranks, because others did not use these parameters. So after a backward pass
        that did not reduce, gradients are sent in the dtype of the reduction. This assumes that all ranks have run
        equally many backward passes since the last reduction.
        """
        known = self._half_gradients and reduces and not self._adds_up and len(dtypes) == 1
        self._input, self._dtype = None, next(iter(dtypes)) if known else None
        self._adds_up = not reduces

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the input, and at the next call for the output, which is ordinary memory and becomes the
        gradient.

        Torch does not say which of the two it requests. If this guess is wrong, after a step that failed halfway, the
        call copies the input to a slot, and its result is still right.
        """
        shape, slots = tuple(map(int, size)), self._memory.slots(REDUCE, reduces_in(self._params()), device)
        numel, self._input, asked = prod(shape), None, self._input
        if slots is None or numel == 0 or asked == (slots.world * numel, dtype):
            return torch.empty(shape, dtype=dtype, device=device)
        self._input = numel, dtype
        with self._explained(dtype):
            return slots.allocate(shape, dtype if self._dtype is None else sent_in(self._dtype, dtype))

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """See `symm_overlap.fsdp.communication.collectives.reduce_scatter`."""
        slots = self._memory.slots(REDUCE, group, output_tensor.device)
        self._input = self._dtype = None
        if slots is None:
            return reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        with self._explained(output_tensor.dtype):
            if not async_op:
                collectives.reduce_scatter(slots, output_tensor, input_tensor, op, self._number)
                return None
            with slots.beside(output_tensor, input_tensor):
                return Issued(collectives.reduce_scatter(slots, output_tensor, input_tensor, op, self._number))

    @contextmanager
    def _explained(self, dtype: torch.dtype) -> Iterator[None]:
        """Add to an error of a reduction in this dtype that ranks may have sent gradients of different dtypes."""
        try:
            yield
        except dist.DistBackendError as error:
            text = str(error)
            possible = self._half_gradients and dtype == torch.float32 and "in a different call" in text
            if not possible or _UNEQUAL in text:
                raise
            raise dist.DistBackendError(f"{text} {_UNEQUAL}") from error


_UNEQUAL = (
    "If ranks run different numbers of backward passes before they reduce (set_requires_gradient_sync), call "
    "symm_overlap.fsdp.apply(model, half_gradients=False): then all of them send gradients in float32."
)


class Issued(dist.Work):
    """A call that has been issued.

    Args:
        event: the event after the call; None if the call is done, as on CPU.
    """

    def __init__(self, event: Any) -> None:
        super().__init__()
        self._event = event

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the call. The call has its own deadline, so ``timeout`` is not used."""
        if self._event is not None:
            self._event.wait()
        return True

    def is_completed(self) -> bool:
        """True if the call is done."""
        return self._event is None or bool(self._event.query())
