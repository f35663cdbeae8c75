"""Gradients in half precision that are reduced in float32: they are sent as they are, and every bit stays the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import symm_overlap.fsdp
from symm_overlap.fsdp._torch import groups_of, state_of
from symm_overlap.fsdp.communication import collectives
from symm_overlap.fsdp.communication.memory import REDUCE
from symm_overlap.fsdp.communication.torch_protocol import SlotReduceScatter
from symm_overlap.plan.layout import ALIGNMENT
from tests.fsdp.trained import blocks, loss_of, model, sharded, train
from tests.ranks import Pool, Rank, RankError

Step = Callable[[Any, int], Tensor]
HALVES = [torch.bfloat16, torch.float16]


def trained(me: Rank, half: torch.dtype, step: Step, half_gradients: bool) -> tuple[list[Tensor], list[Any]]:
    """Return the losses and parameters of a training, and the dtypes in which each reduction was sent and returned."""
    sent: list[tuple[torch.dtype, torch.dtype]] = []
    reduce_scatter = collectives.reduce_scatter

    def noted(slots: Any, output: Tensor, input: Tensor, *rest: Any) -> Any:
        sent.append((input.dtype, output.dtype))
        assert slots.holds(input), "FSDP2 did not fill the slot"
        return reduce_scatter(slots, output, input, *rest)

    collectives.reduce_scatter = noted
    try:
        policy = MixedPrecisionPolicy(half, torch.float32)
        # Nothing is gathered in backward, so ranks may use different modules there.
        made = sharded(me, model(torch.float32), mp_policy=policy, reshard_after_forward=False)
        symm_overlap.fsdp.apply(made, half_gradients=half_gradients)
        return train(me, made, step, steps=2), sent
    finally:
        collectives.reduce_scatter = reduce_scatter


def plain(me: Rank, made: nn.Module, index: int) -> Tensor:
    return loss_of(me, made, index, torch.float32)


def summed(me: Rank, made: Any, index: int) -> Tensor:
    for module in (*blocks(made), made):
        module.set_force_sum_reduction_for_comms(True)
    return plain(me, made, index)


def divided(me: Rank, made: Any, index: int) -> Tensor:
    for module in (*blocks(made), made):
        module.set_gradient_divide_factor(3.0)
    return plain(me, made, index)


def reduced_twice(me: Rank, made: Any, index: int) -> Tensor:
    plain(me, made, 10 + index)
    return plain(me, made, index)


def same_bits(me: Rank, half: torch.dtype, step: Callable[..., Tensor]) -> None:
    found, sent = trained(me, half, partial(step, me), True)
    wanted, sent_wide = trained(me, half, partial(step, me), False)
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert set(sent) == {(half, torch.float32)}
    assert set(sent_wide) == {(torch.float32, torch.float32)}
    assert len(sent) == len(sent_wide)


@pytest.mark.parametrize("half", HALVES)
def test_gradients_are_sent_as_they_are_and_no_bit_changes(ranks: Pool, half: torch.dtype) -> None:
    for world in (2, 3):
        for step in (plain, summed, divided, reduced_twice) if world == 2 else (plain,):
            ranks.run(world, same_bits, half, step)


def accumulated(me: Rank, some: bool, made: Any, index: int) -> Tensor:
    """Add up the gradients of two batches. With ``some``, the blocks have no gradient on rank 1 for the first one.

    `apply` is called once between the two.
    """
    made.set_requires_gradient_sync(False)
    if some and me.rank == 1:
        handle = blocks(made)[-1].register_forward_hook(lambda module, inputs, output: output.detach())  # type: ignore[attr-defined]
        plain(me, made, 10 + index)
        handle.remove()
    else:
        plain(me, made, 10 + index)
    made.set_requires_gradient_sync(True)
    if index == 1:
        symm_overlap.fsdp.apply(made)
    return plain(me, made, index)


def added_up(me: Rank) -> None:
    for some in (False, True):
        step = partial(accumulated, me, some)
        found, sent = trained(me, torch.bfloat16, step, True)
        wanted, _ = trained(me, torch.bfloat16, step, False)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert set(sent) == {(torch.float32, torch.float32)}, "sums of several backward passes are float32"


def test_gradients_that_are_added_up_first_are_sent_in_float32(ranks: Pool) -> None:
    """Also by a rank that has nothing to add up, so that all ranks send the same dtype."""
    ranks.run(2, added_up)


def then_again(me: Rank, made: Any, index: int) -> Tensor:
    return accumulated(me, False, made, index) if index == 0 else plain(me, made, index)


def afterwards(me: Rank) -> None:
    found, sent = trained(me, torch.bfloat16, partial(then_again, me), True)
    wanted, sent_wide = trained(me, torch.bfloat16, partial(then_again, me), False)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    dtypes = [dtype for dtype, _ in sent]
    half = len(dtypes) // 2
    assert dtypes == [torch.float32] * half + [torch.bfloat16] * half
    assert len(sent_wide) == len(sent)


def test_the_step_after_such_a_step_sends_half_of_the_bytes_again(ranks: Pool) -> None:
    ranks.run(2, afterwards)


def completed(me: Rank, made: Any, index: int) -> Tensor:
    for module in (*blocks(made), made):
        module.set_reduce_scatter_unused_params(True)
    return plain(me, made, index)


def completed_gradients(me: Rank) -> None:
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # not in torch 2.11
        _, sent = trained(me, torch.bfloat16, partial(completed, me), True)
        assert set(sent) == {(torch.float32, torch.float32)}


def test_if_zeros_are_reduced_for_unused_parameters_float32_is_sent(ranks: Pool) -> None:
    """A rank does not know for which parameters the others have zeros, nor in which dtype."""
    ranks.run(2, completed_gradients)


def other_gradients(me: Rank) -> None:
    """Apply twice, and take the communication away again."""
    made = sharded(me, model(torch.float32), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    symm_overlap.fsdp.apply(made)
    symm_overlap.fsdp.apply(made)
    params = groups_of(state_of(made))[0]
    inner = vars(params)["post_backward"]
    symm_overlap.fsdp.apply(made)
    assert vars(params)["post_backward"] is inner, "each apply wrapped it anew"
    expected = SlotReduceScatter.expect
    told: list[tuple[set[torch.dtype], bool]] = []

    def note(self: SlotReduceScatter, dtypes: set[torch.dtype], reduces: bool) -> None:
        told.append((dtypes, reduces))
        expected(self, dtypes, reduces)

    SlotReduceScatter.expect = note  # type: ignore[method-assign]
    try:
        plain(me, made, 0)
    finally:
        SlotReduceScatter.expect = expected  # type: ignore[method-assign]
    assert told == [({torch.bfloat16}, True)] * 5


def test_gradients_are_announced_once_however_often_apply_is_called(ranks: Pool) -> None:
    ranks.run(2, other_gradients)


def uneven(me: Rank, how: str, half_gradients: bool) -> None:
    """Rank 0 has two batches a step, and rank 1 has one. Nothing is gathered between the two."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    made: Any = sharded(me, model(torch.float32), mp_policy=policy, reshard_after_forward=False)
    symm_overlap.fsdp.apply(made, half_gradients=half_gradients)
    made.set_reshard_after_backward(False)
    numbers = range(2 - me.rank)
    for number in numbers:
        made.set_requires_gradient_sync(number == numbers[-1])
        if how == "resharded at the end":
            made.set_reshard_after_backward(number == numbers[-1])
        plain(me, made, number)


@pytest.mark.parametrize(
    ("how", "half_gradients"), [("never resharded", True), ("never resharded", False), ("resharded at the end", False)]
)
def test_ranks_may_add_up_different_numbers_of_gradients(ranks: Pool, how: str, half_gradients: bool) -> None:
    ranks.run(2, uneven, how, half_gradients)


def test_if_that_is_noticed_too_late_the_error_says_what_to_do(fresh_ranks: Callable[..., Pool]) -> None:
    """A rank cannot know that the other one has added up gradients, as it would send them in its own way."""
    with pytest.raises(RankError) as raised:
        fresh_ranks(2).run(2, uneven, "resharded at the end", True)
    for text in raised.value.failures.values():
        assert text.splitlines()[-1].count("symm_overlap.fsdp.apply(model, half_gradients=False)") == 1


def reserved(me: Rank) -> None:
    found = []
    for half_gradients, unused in ((True, False), (True, True), (False, False)):
        made: Any = sharded(me, model(torch.float32), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        if unused and not hasattr(made, "set_reduce_scatter_unused_params"):
            continue  # torch 2.11
        for module in (*blocks(made), made):
            if unused:
                module.set_reduce_scatter_unused_params(True)
        symm_overlap.fsdp.apply(made, half_gradients=half_gradients)
        slots = groups_of(state_of(made))[0]._reduce_scatter_comm._memory.slots(REDUCE, me.group, me.device)
        before = slots.nbytes
        plain(me, made, 0)
        assert slots.nbytes == before
        found.append(before)
    small, *large = found
    assert all(each >= 2 * small - ALIGNMENT for each in large)


def test_the_memory_for_reductions_is_reserved_for_what_is_sent(ranks: Pool) -> None:
    ranks.run(2, reserved)
