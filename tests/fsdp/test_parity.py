"""FSDP2 trains as DDP does: all ten steps have the same losses, and the first and the last have the same parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from symm_overlap import fsdp
from tests.fsdp.cases import Case, assert_equal, under_ddp, under_fsdp
from tests.ranks import Pool, Rank

PLAIN = Case()
EACH = [
    PLAIN,
    Case(adam=True),
    Case(reshard=False),
    Case(recompute=True),
    Case(microbatches=3, sync=True),
    Case(microbatches=3, sync=False),
    Case(frozen=True),
    Case(tied=True),
    Case(twice=True),
]
TOGETHER = [
    Case(adam=True, recompute=True, microbatches=2, sync=False, frozen=True, tied=True, twice=True),
    Case(adam=True, recompute=True, microbatches=2, sync=True, tied=True, twice=True, reshard=False),
]
ROUNDED = {torch.float64: 1e-12, torch.float32: 1e-5}
"""The relative difference that rounding may cause in ten steps."""


def as_torch_has_it(model: nn.Module) -> None:
    """Change nothing."""


def all_of_ours(model: nn.Module) -> None:
    """Communicate through symmetric memory, and gather two layers ahead."""
    fsdp.apply(model)
    fsdp.plan_prefetch(model, "depth=2", verbose=False)


WAYS = {"torch": as_torch_has_it, "apply": fsdp.apply, "apply and plan_prefetch": all_of_ours}


def equals_ddp(me: Rank, cases: list[Case], ways: list[str]) -> None:
    for case in cases:
        expected = under_ddp(case, me.group)
        for way in ways:
            assert_equal(under_fsdp(case, me.group, WAYS[way]), expected, ROUNDED[case.dtype], f"{way}, {case}")


def equals_torch(me: Rank, cases: list[Case]) -> None:
    for case in cases:
        expected = under_fsdp(case, me.group, as_torch_has_it)
        assert_equal(under_fsdp(case, me.group, fsdp.apply), expected, ROUNDED[case.dtype], f"apply, {case}")


def test_fsdp_with_our_communication_trains_what_ddp_trains(ranks: Pool) -> None:
    ranks.run(2, equals_ddp, EACH, ["apply"])


@pytest.mark.slow
def test_it_does_so_with_everything_at_once_and_with_planned_prefetch(ranks: Pool) -> None:
    ranks.run(3, equals_ddp, TOGETHER, ["torch", "apply and plan_prefetch"])


@pytest.mark.slow
def test_it_does_so_in_float32_and_in_mixed_precision(ranks: Pool) -> None:
    # Use two ranks, because their sum has only one order. With more ranks, another order may change the last bit of a
    # gradient, and rounding to bfloat16 may turn that into a whole bit of bfloat16.
    cases = [replace(case, dtype=torch.float32) for case in (PLAIN, *TOGETHER)]
    mixed = [replace(case, mixed=True) for case in cases]
    apart = [replace(case, tied=False, twice=False) for case in mixed if not case.sync]
    ranks.run(2, equals_ddp, [*cases, *(case for case in mixed if case.sync), *apart], ["apply"])
    # Two uses of a parameter have two gradients. DDP adds them in bfloat16. Torch 2.15 adds them in float32 if they are
    # not reduced at once.
    ranks.run(2, equals_torch, [case for case in mixed if not case.sync])


def doubles_gradients(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def differs_from_ddp(me: Rank) -> None:
    expected = under_ddp(PLAIN, me.group)
    with pytest.raises(AssertionError, match=r"doubled: .* after step 1"):
        assert_equal(under_fsdp(PLAIN, me.group, doubles_gradients), expected, 1e-3, "doubled")


def test_a_sum_in_place_of_a_mean_is_found(ranks: Pool) -> None:
    ranks.run(2, differs_from_ddp)
