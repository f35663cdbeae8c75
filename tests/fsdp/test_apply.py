"""Training with our communication gives the results of torch's own, with every option of FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import symm_overlap.fsdp
from symm_overlap.fsdp._torch import groups_of, state_of
from symm_overlap.fsdp.communication.slots import Slots
from symm_overlap.fsdp.communication.torch_protocol import SlotAllGather
from tests.fsdp.trained import WIDTH, Block, batch, blocks, loss_of, model, reference, sharded, train, with_and_without
from tests.ranks import Pool, Rank


def rings(made: nn.Module) -> list[Slots]:
    """Return all rings of slots of a model."""
    modules = [module for module in made.modules() if isinstance(module, FSDPModule)]
    comms = [params._all_gather_comm for module in modules for params in groups_of(state_of(module))]
    memories = {comm._memory for comm in comms if isinstance(comm, SlotAllGather)}
    return [slots for memory in memories for slots in memory._found.values() if isinstance(slots, Slots)]


def turns(made: nn.Module) -> dict[str, int]:
    """Return how many calls went through slots, by collective."""
    found: dict[str, int] = {}
    for slots in rings(made):
        found[slots.op] = found.get(slots.op, 0) + slots.turn
    return found


def as_ddp(me: Rank) -> dict[str, int]:
    made = sharded(me, model())
    symm_overlap.fsdp.apply(made)
    for found, wanted in zip(train(me, made, partial(loss_of, me)), reference(me), strict=True):
        torch.testing.assert_close(found, wanted)
    return turns(made)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_training_is_that_of_ddp(ranks: Pool, world: int) -> None:
    found = ranks.run(world, as_ddp)
    # In a step, four blocks are gathered in forward and in backward. The root stays gathered, so it is gathered once.
    assert found == [{"FSDP all-gather": 4 * 9, "FSDP reduce-scatter": 4 * 5}] * world


def made_with(me: Rank, dtype: torch.dtype, options: dict[str, Any]) -> nn.Module:
    return sharded(me, model(dtype), **options)


def options_of_torch(me: Rank) -> None:
    bf16, float32, float64 = torch.bfloat16, torch.float32, torch.float64
    cases: tuple[tuple[dict[str, Any], torch.dtype, float], ...] = (
        ({"reshard_after_forward": False}, float64, 1e-7),
        ({"reshard_after_forward": 2}, float64, 1e-7),  # in backward, it gathers in groups of two
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, float64, 1e-7),
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=float32)}, float32, 1e-4),
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=bf16)}, float32, 1e-2),
    )
    for options, dtype, error in cases:
        make = partial(made_with, me, dtype, options)
        made = with_and_without(me, make, partial(loss_of, me, dtype=dtype), error)
        assert turns(made)["FSDP all-gather"] > 0
        gathers = [slots for slots in rings(made) if slots.op == "FSDP all-gather"]
        assert len(gathers) == (2 if options.get("reshard_after_forward") == 2 else 1), "modules must share slots"


@pytest.mark.slow
def test_options_of_fully_shard(fresh_ranks: Callable[..., Pool]) -> None:
    fresh_ranks(4).run(4, options_of_torch)  # the ranks create groups


def mixed_precisions(me: Rank) -> None:
    bf16, float32 = torch.bfloat16, torch.float32
    halves = [{"param_dtype": bf16, "reduce_dtype": dtype} for dtype in (float32, torch.float64)]
    for dtypes in ({}, {"param_dtype": bf16}, {"reduce_dtype": bf16}, *halves):
        made = sharded(me, model(float32), mp_policy=MixedPrecisionPolicy(**dtypes))
        symm_overlap.fsdp.apply(made)
        reserved = [(slots.op, slots.nbytes) for slots in rings(made)]
        train(me, made, partial(loss_of, me, dtype=float32))
        assert [(slots.op, slots.nbytes) for slots in rings(made)] == reserved, dtypes


def test_the_memory_that_a_step_needs_is_reserved(ranks: Pool) -> None:
    ranks.run(2, mixed_precisions)


def prefetches(me: Rank) -> None:
    def make(depth: int) -> nn.Module:
        made = sharded(me, model(layers=6))
        each = blocks(made)
        for index, block in enumerate(each):
            block.set_modules_to_forward_prefetch(each[index + 1 : index + 1 + depth])
            block.set_modules_to_backward_prefetch(each[max(0, index - depth) : index][::-1])
        return made

    def asynchronous(made: nn.Module, index: int) -> Tensor:
        for block in blocks(made):
            block.unshard(async_op=True)
        return loss_of(me, made, index)

    for depth in (1, 2, 4):
        with_and_without(me, partial(make, depth), partial(loss_of, me))
    made = with_and_without(me, partial(make, 0), asynchronous)
    assert turns(made)["FSDP all-gather"] == 4 * 13


def test_prefetch_and_all_gathers_that_are_asked_for_early(ranks: Pool) -> None:
    ranks.run(2, prefetches)


def ways_to_reduce(me: Rank) -> None:
    def make(dtype: torch.dtype, setting: str, *values: Any) -> nn.Module:
        made = sharded(me, model(dtype))
        for block in [*blocks(made), made]:
            getattr(block, setting)(*values)
        return made

    def accumulated(made: Any, index: int) -> Tensor:
        made.set_requires_gradient_sync(False)
        loss_of(me, made, 10 + index)
        made.set_requires_gradient_sync(True)
        return loss_of(me, made, index)

    def twice(made: nn.Module, index: int) -> Tensor:
        loss_of(me, made, 10 + index)
        return loss_of(me, made, index)

    for step in (accumulated, twice):
        with_and_without(me, lambda: sharded(me, model()), step)
    in_float32, in_float16 = (partial(loss_of, me, dtype=dtype) for dtype in (torch.float32, torch.float16))
    summed = partial(make, torch.float32, "set_force_sum_reduction_for_comms", True)
    with_and_without(me, summed, in_float32, 1e-5)
    with_and_without(me, partial(make, torch.float16, "set_gradient_divide_factor", 4.0), in_float16, 1e-2)
    # gloo has no pre-multiplied sum to compare with. Here the sum is half of the mean over the ranks.
    before, ours = model(torch.float32), make(torch.float32, "set_gradient_divide_factor", 2.0 * me.world)
    symm_overlap.fsdp.apply(ours)
    whole, half = (train(me, made, in_float32, 1)[1:] for made in (summed(), ours))
    for old, one, other in zip(before.parameters(), whole, half, strict=True):
        torch.testing.assert_close(2 * (other - old.detach()), one - old.detach(), rtol=1e-4, atol=1e-6)


def test_gradients_are_accumulated_summed_and_divided(ranks: Pool) -> None:
    ranks.run(3, ways_to_reduce)


class Odd(nn.Module):
    """A model with a block that is used twice, two layers that share a weight, a frozen and a checkpointed block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.twice, self.frozen, self.again = Block(9), Block(4).requires_grad_(False), Block(11)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.frozen(self.twice(self.first(x))))
        out: Tensor = self.last(checkpoint(self.again, x, use_reentrant=False)) * self.scale
        return out


def odd_models(me: Rank) -> None:
    with_and_without(me, lambda: sharded(me, Odd().double()), partial(loss_of, me))


def test_modules_used_twice_shared_frozen_and_checkpointed(ranks: Pool) -> None:
    ranks.run(3, odd_models)


class MixedDtypes(nn.Module):
    """Parameters of three dtypes, which are gathered as bytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(WIDTH, 5)
        self.table = nn.Parameter(torch.randn(5, dtype=torch.float64), requires_grad=False)
        self.shift = nn.Parameter(torch.randn(3, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.table.float() + self.shift.float().sum()
        return out


def gathers_bytes(me: Rank) -> None:
    def make() -> nn.Module:
        made = MixedDtypes()
        fully_shard(made, mesh=DeviceMesh.from_group(me.group, "cpu"))
        return made

    with_and_without(me, make, partial(loss_of, me, dtype=torch.float32), 1e-5)


def test_parameters_of_several_dtypes(ranks: Pool) -> None:
    ranks.run(3, gathers_bytes)


def applied_again(me: Rank) -> None:
    made = sharded(me, model())
    train(me, made, partial(loss_of, me), 1)  # a step before apply
    symm_overlap.fsdp.apply(made)
    train(me, made, partial(loss_of, me), 1)
    symm_overlap.fsdp.apply(made[0])  # type: ignore[index]
    other = sharded(me, model())
    symm_overlap.fsdp.apply(nn.ModuleList([made, other]))
    expected = sharded(me, model())
    for _ in range(2):
        train(me, expected, partial(loss_of, me), 1)
    for index in (2, 3):
        both = made(batch(index, me.rank)) + other(batch(index + 1, me.rank))
        wanted = expected(batch(index, me.rank)) + other(batch(index + 1, me.rank))
        torch.testing.assert_close(both, wanted)
        both.square().sum().backward()
        wanted.square().sum().backward()


def test_apply_may_come_late_again_and_for_several_models(ranks: Pool) -> None:
    ranks.run(2, applied_again)


def recovers(me: Rank, forward: bool) -> None:
    """All ranks raise the same error of their own, reset the model, and go on."""
    found = []
    for apply in (False, True):
        made: Any = sharded(me, model())
        if apply:
            symm_overlap.fsdp.apply(made)
        loss_of(me, made, 0)
        inner = next(each for each in blocks(made)[1].modules() if isinstance(each, nn.Linear))
        register = inner.register_forward_hook if forward else inner.register_full_backward_hook
        hook = register(fail)
        with pytest.raises(KeyError, match="of the user"):
            loss_of(me, made, 1)
        hook.remove()
        made.reset_iter_state()
        made.zero_grad()
        for step in (2, 3):
            loss_of(me, made, step)
        gradients = [parameter.grad for parameter in made.parameters()]
        found.append([each.to_local() for each in gradients if isinstance(each, DTensor)])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert found[0]


def fail(*unused: Any) -> None:
    raise KeyError("of the user's own")


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch 2.13 has it")
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_a_model_can_be_reset_after_an_error_of_the_users_own(fresh_ranks: Callable[..., Pool], forward: bool) -> None:
    fresh_ranks(2).run(2, recovers, forward)
