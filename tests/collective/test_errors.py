"""Bad input raises ValueError or TypeError, which name the sizes, on the rank that passed it, before communication."""

from __future__ import annotations

import time

import pytest
import torch

import symm_overlap
from tests.collective import reference as ref
from tests.collective.bad_calls import BAD, t
from tests.ranks import Pool, Rank
from tests.transforms import comparing

ops = torch.ops.symm_overlap


def good(me: Rank, op: str) -> None:
    """Make a correct call of the same op directly afterwards, and compare its result exactly."""
    name = me.group.group_name
    A, B = ref.binary((4, 3), torch.float32, seed=me.rank), ref.binary((3, 6), torch.float32, seed=9)
    total = sum(ref.binary((4, 3), torch.float32, seed=rank) for rank in range(me.world))
    whole = torch.cat([ref.binary((4, 3), torch.float32, seed=rank) for rank in range(me.world)])
    part = slice(me.rank * 4 // me.world, (me.rank + 1) * 4 // me.world)
    found, expected = {
        "ag": lambda: (ops.fused_all_gather_matmul(A, [B], 0, name)[1][0], whole @ B),
        "rs": lambda: (ops.fused_matmul_reduce_scatter(A, B, "sum", 0, name), (total @ B)[part]),
        "ar": lambda: (ops.fused_matmul_all_reduce(A, B, "sum", name), total @ B),
        "g": lambda: (ops.all_gather(A, 0, name), whole),
        "s": lambda: (ops.reduce_scatter(A, "sum", 0, name), total[part]),
        "r": lambda: (ops.all_reduce(A, "sum", name), total),
    }[op]()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def call_badly(me: Rank, case: str, together: bool) -> None:
    bad = BAD[case]
    if not together and me.rank > 0:  # rank 0 is alone at first: communication would have to wait
        time.sleep(0.05)
    # When calls are compared, peers are also notified of rejected calls.
    with comparing(together), symm_overlap.timeout(5), pytest.raises(bad.error) as raised:
        bad.call(me.group.group_name)
    assert raised.type is bad.error
    for words in bad.says:
        assert words in str(raised.value), f"{words!r} is not in: {raised.value}"
    good(me, bad.op)  # all have made the same calls, so the group stays usable


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_before_any_communication_and_the_group_stays_usable(
    ranks: Pool, case: str, together: bool
) -> None:
    ranks.run(2, call_badly, case, together)


def call_with_gradients(me: Rank) -> None:
    A, B = t(5, 3).requires_grad_(), t(3, 4).requires_grad_()
    with pytest.raises(ValueError, match="size 5"):
        ops.fused_matmul_reduce_scatter(A, B, "sum", 0, me.group.group_name)
    good(me, "rs")


def test_autograd_lets_the_same_error_through(ranks: Pool) -> None:
    ranks.run(2, call_with_gradients)
