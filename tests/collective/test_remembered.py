"""Cached data of earlier calls is never used for a call that differs from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import symm_overlap
from symm_overlap import _C
from symm_overlap.collective import arguments
from symm_overlap.collective.arguments import remembered
from symm_overlap.collective.exchange import route
from symm_overlap.runtime import state_of
from tests.ranks import Pool, Rank
from tests.transforms import choices, comparing

X = torch.ones(4, 6)

ARGUMENTS: list[tuple[Any, ...]] = [
    (),
    (X,),
    (X, X),
    ([X, X],),
    ([X], X),
    ([X], [X]),
    ([], [X, X]),
    (torch.ones(6, 4),),
    (torch.ones(24),),
    (torch.ones(4, 6, 1),),
    (torch.ones(4, 6, dtype=torch.float64),),
    (torch.ones(4, 6, dtype=torch.bfloat16),),
    (torch.ones(4, 6, device="meta"),),
    (torch.ones(()),),
    (None,),
    (X, None),
    (0,),
    (1,),
    (-1,),
    (False,),
    (True,),
    ("",),
    ("sum",),
    ("sum", "avg"),
    ("sumavg",),
    (torch.float32,),
    (torch.float64,),
    ((4, 6),),
    (4, 6),
]


def test_other_arguments_are_not_alike() -> None:
    """Arguments that differ in structure, shape, dtype, device or value have different likenesses."""
    for one, other in itertools.combinations(ARGUMENTS, 2):
        assert _C.argument_key(one) != _C.argument_key(other), f"{one} and {other}"


def test_arguments_are_alike_whatever_the_numbers_and_places_in_memory() -> None:
    """Elements, strides and addresses of tensors do not affect the argument key."""
    tensors = [X, torch.zeros(4, 6), torch.ones(6, 4).t(), torch.ones(8, 6)[4:], torch.nn.Parameter(torch.ones(4, 6))]
    assert len({_C.argument_key((tensor, 1, "sum")) for tensor in tensors}) == 1
    assert _C.argument_key([X, [X]]) == _C.argument_key((X, (X,)))
    assert _C.call_key((X, [X])) != _C.call_key((X, (X,))), "the dispatcher does not pass a tuple on as it is"


def test_what_cannot_be_alike_is_refused() -> None:
    with pytest.raises(TypeError, match="an argument of type object has no argument key"):
        _C.argument_key((object(),))


def test_a_description_is_made_once_for_arguments_that_are_alike_and_errors_each_time() -> None:
    asked: list[tuple[Any, ...]] = []

    @remembered
    def describe(*given: Any) -> int:
        asked.append(given)
        if not given:
            raise ValueError("nothing is given")
        return len(asked)

    assert [describe(X, 1), describe(torch.zeros(4, 6), 1), describe(X, 2), describe(X, 1)] == [1, 1, 2, 1]
    for _ in range(2):
        with pytest.raises(ValueError, match="nothing is given"):
            describe()
    assert len(asked) == 4


def test_no_more_descriptions_are_kept_than_allowed() -> None:
    asked: list[int] = []

    @remembered
    def describe(number: int) -> int:
        asked.append(number)
        return number

    with mock.patch.object(arguments, "MOST_REMEMBERED", 3):
        for number in (0, 1, 2, 0, 3, 3, 0):  # the fourth kind of arguments clears the cache
            assert describe(number) == number
    assert asked == [0, 1, 2, 3, 0]


def test_tensors_that_autograd_or_a_mode_has_to_see_have_no_kernel_key() -> None:
    class Other(torch.Tensor):
        pass

    plain, other, needs = torch.ones(2), torch.ones(2).as_subclass(Other), torch.ones(2, requires_grad=True)
    for arguments_of in (
        lambda tensor: (tensor, 1),
        lambda tensor: ("sum", [plain, tensor]),
        lambda tensor: ((tensor,),),
    ):
        for tensor in (plain, torch.nn.Parameter(plain, requires_grad=False)):
            assert _C.kernel_key(arguments_of(tensor)) is not None
        assert _C.kernel_key(arguments_of(other)) is None
        for tensor in (needs, torch.nn.Parameter(plain)):
            assert _C.kernel_key(arguments_of(tensor)) is None
            with torch.no_grad():
                assert _C.kernel_key(arguments_of(tensor)) is not None
    with forward_ad.dual_level():
        assert _C.kernel_key(("sum", [forward_ad.make_dual(plain, plain)])) is None
    assert _C.kernel_key((plain, object())) is None


def another_setting_takes_another_route(me: Rank, lane: int) -> None:
    A, B = torch.ones(600, 8), torch.ones(8, 8)
    blocks: dict[str, Callable[[], Any]] = {
        "pipelined 1": lambda: symm_overlap.force_path("pipelined", chunks=1),
        "pipelined 3": lambda: symm_overlap.force_path("pipelined", chunks=3),
        "sequential 1": lambda: symm_overlap.force_path("sequential"),
        "c10d 2": lambda: symm_overlap.force_path("c10d", chunks=2),
    }
    for dtype in (torch.float32, torch.float64):
        for _ in range(2):
            for expected, block in blocks.items():
                with block(), choices() as made:
                    _, (product,) = symm_overlap.all_gather_matmul(A.to(dtype), [B.to(dtype)], 0, me.group)
                assert [f"{choice.path} {choice.chunks}" for _, choice in made] == [expected]
                assert torch.equal(product, torch.full((me.world * 600, 8), 8.0, dtype=dtype))
    before = state_of(me.group).calls[lane]
    with comparing(False):
        symm_overlap.all_gather(A, 0, me.group)
        with symm_overlap.lane(lane):
            symm_overlap.all_gather(A, 0, me.group)
    assert state_of(me.group).calls[lane] == before + 1


def test_a_changed_setting_is_never_served_the_route_of_another(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    """A cached route is used only under the settings for which it was created."""
    ranks.run(2, another_setting_takes_another_route, fresh_lane())


def routes_are_few(me: Rank) -> None:
    group = dist.new_group(list(range(me.world)))
    with mock.patch.object(route, "MOST_ROUTES", 4):
        for rows in range(1, 11):
            found = symm_overlap.all_gather(torch.full((rows, 2), 1.0 * me.rank), 0, group)
            assert len(state_of(group).routes) <= 4
            assert found[::rows, 0].tolist() == [float(rank) for rank in range(me.world)]


def test_no_more_routes_are_kept_than_allowed(ranks: Pool) -> None:
    ranks.run(5, routes_are_few)  # new_group is for all ranks of the pool


def group_made_again(me: Rank) -> None:
    """Create the world group again under the same name: unchanged, with its ranks in another order, and of one rank."""
    store, name = dist.distributed_c10d._get_default_store(), me.group_name
    A, B = torch.full((4, 4), 1.0 + me.rank), torch.eye(4)
    orders: list[list[int]] = [[0, 1], [1, 0], [me.rank], [0, 1]]
    for number, order in enumerate(orders):
        if number > 0:
            dist.destroy_process_group()
            prefix = dist.PrefixStore(f"again {number} {order if len(order) == 1 else ''}", store)
            dist.init_process_group("gloo", store=prefix, rank=order.index(me.rank), world_size=len(order))
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.group_name == name
        assert not state_of(dist.group.WORLD).routes
        values = [1.0 + rank for rank in order]
        for _ in range(3):
            assert symm_overlap.all_reduce(A, "sum", name)[0, 0] == sum(values)
            gathered, (product,) = symm_overlap.all_gather_matmul(A, [B], 0, name)
            assert gathered is not None
            assert gathered[::4, 0].tolist() == product[::4, 0].tolist() == values


def test_a_group_made_again_under_the_same_name_takes_routes_of_its_own(fresh_ranks: Callable[..., Pool]) -> None:
    fresh_ranks(2).run(2, group_made_again)
