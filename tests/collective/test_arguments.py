"""Ops accept groups in every form and reject arguments of wrong types. So do the settings around a call."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import symm_overlap
from symm_overlap.collective.arguments import group_name
from symm_overlap.settings import current
from tests.collective import reference as ref
from tests.collective.bad_calls import t
from tests.collective.test_errors import good
from tests.ranks import Pool, Rank


def call_with_groups(me: Rank) -> None:
    A = ref.binary((2, 3), torch.float32, seed=me.rank)
    expected = torch.cat([ref.binary((2, 3), torch.float32, seed=rank) for rank in range(me.world)])
    line = DeviceMesh.from_group(me.group, "cpu")
    square = DeviceMesh.from_group(
        [me.group, me.group], "cpu", mesh=torch.arange(me.world).view(1, -1), mesh_dim_names=("a", "b")
    )
    for group in (me.group, me.group.group_name, line, (line, 0), (square, 1), (square, "b")):
        torch.testing.assert_close(symm_overlap.all_gather(A, 0, group), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="DeviceMesh of 2 dimensions: pass one of them"):
        symm_overlap.all_gather(A, 0, square)
    for group in (3, [me.group]):
        with pytest.raises(TypeError, match="group must be a ProcessGroup, its name"):
            symm_overlap.all_gather(A, 0, group)
    assert group_name(None) == dist.group.WORLD.group_name  # type: ignore[union-attr]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        with pytest.raises(TypeError, match=r"group is None: before torch\.distributed\.init_process_group"):
            symm_overlap.all_gather(A, 0, None)
        patch.setattr(DeviceMesh, "get_group", lambda *_: [][0])  # as on a rank outside of the mesh
        patch.setattr(DeviceMesh, "get_coordinate", lambda _: None)
        for group in (line, (line, 0), (square, "b")):
            with pytest.raises(ValueError, match="this rank is not in DeviceMesh"):
                symm_overlap.all_gather(A, 0, group)
    with pytest.raises(ValueError, match="this rank is not in the group"):
        symm_overlap.all_gather(A, 0, dist.GroupMember.NON_GROUP_MEMBER)
    for dim in (2, -3, "c", 0.0):
        with pytest.raises(ValueError, match=f"has no dimension {dim!r}"):
            symm_overlap.all_gather(A, 0, (square, dim))
    good(me, "g")


def arguments_of_wrong_types(me: Rank) -> None:
    A, B = t(4, 4), t(4, 4)
    for call, argument in (
        (lambda: symm_overlap.all_gather_matmul(A, [B], 0.0, me.group), "gather_dim"),
        (lambda: symm_overlap.all_gather_matmul(2.0, [B], 0, me.group), "'A'"),
        (lambda: symm_overlap.matmul_reduce_scatter(A, B, dist.ReduceOp.SUM, 0, me.group), "reduce_op"),
        (lambda: symm_overlap.matmul_all_reduce(A, [B], "sum", me.group), "'B'"),
        (lambda: symm_overlap.all_gather([A], 0, me.group), "A_shard"),
        (lambda: symm_overlap.reduce_scatter(A, "sum", None, me.group), "scatter_dim"),
        (lambda: symm_overlap.all_reduce(A, 1, me.group), "reduce_op"),
    ):
        with pytest.raises(TypeError, match=f"symm_overlap::.*{argument}") as raised:
            call()
        assert "\n" not in str(raised.value), "the message shows all numbers of a wrong tensor"
    for call, argument in (
        (lambda: symm_overlap.all_gather_matmul(None, [B], 0, me.group), "A_shard"),
        (lambda: symm_overlap.matmul_reduce_scatter(A, None, "sum", 0, me.group), "B"),
        (lambda: symm_overlap.matmul_all_reduce(None, B, "sum", me.group), "A"),
    ):
        with pytest.raises(TypeError, match=f"^{argument} is None: give a tensor"):
            call()
    for call in (
        lambda: symm_overlap.all_gather(None, 0, me.group),
        lambda: symm_overlap.reduce_scatter(None, "sum", 0, me.group),
        lambda: symm_overlap.all_reduce(A.to_sparse(), "sum", me.group),
    ):
        with pytest.raises(TypeError, match="takes tensors on CPU or CUDA: "):
            call()
    good(me, "g")


def test_arguments_of_wrong_types_are_type_errors(ranks: Pool) -> None:
    ranks.run(2, arguments_of_wrong_types)


def test_groups_are_process_groups_names_and_mesh_dimensions_and_nothing_else(ranks: Pool) -> None:
    ranks.run(2, call_with_groups)


def call_for_a_group_of_others(me: Rank) -> None:
    names: list[object] = [me.groups[0, 1].group_name if me.rank == 0 else None]
    dist.broadcast_object_list(names, src=0, group=me.group)
    if me.rank == 2:
        with pytest.raises(ValueError, match="no process group is named"):
            symm_overlap.all_gather(t(2), 0, names[0])
    good(me, "g")


def test_a_rank_outside_a_group_cannot_call_for_it(ranks: Pool) -> None:
    ranks.run(3, call_for_a_group_of_others)


def a_group_of_before(me: Rank) -> None:
    """After the groups were destroyed, a new one gets the name of an old one."""
    A, old = torch.full((2,), me.rank + 1.0), dist.group.WORLD
    assert symm_overlap.all_reduce(A, "sum", old).tolist() == [3.0, 3.0]
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="no process group is named"):
        symm_overlap.all_reduce(A, "sum", old)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD.group_name == old.group_name
    with pytest.raises(ValueError, match="group is a process group that was destroyed; another one is named"):
        symm_overlap.all_reduce(A, "sum", old)
    assert symm_overlap.all_reduce(A, "sum", dist.group.WORLD).tolist() == A.tolist()


def test_a_destroyed_group_is_refused_although_its_name_is_used_again(fresh_ranks: Callable[..., Pool]) -> None:
    fresh_ranks(2).run(2, a_group_of_before)


def prepare_badly(me: Rank) -> None:
    with pytest.raises(ValueError, match="no process group is named 'nobody'"), symm_overlap.prepare():
        symm_overlap.all_gather(t(2), 0, "nobody")
    with pytest.raises(RuntimeError, match="inside another"), symm_overlap.prepare(), symm_overlap.prepare():
        pass
    for seconds in (0, -1, float("nan"), timedelta(0), 1e10):
        with pytest.raises(ValueError, match="number of seconds"):
            symm_overlap.timeout(seconds)
    for seconds in (None, "3", [3]):
        with pytest.raises(TypeError, match="number of seconds"):
            symm_overlap.timeout(seconds)
    with symm_overlap.timeout(timedelta(milliseconds=2500)):
        assert current().timeout == 2.5
    with pytest.raises(ValueError, match=r"lane\(-1\)"), symm_overlap.lane(-1):
        pass
    with pytest.raises(TypeError, match=r"lane: index is 1\.5, which is not an integer"), symm_overlap.lane(1.5):
        pass
    for name in ("chunks", "streams", "span"):
        with pytest.raises(TypeError, match=rf"force_path: {name} is 2\.0, which is not an integer"):
            symm_overlap.force_path(None, **{name: 2.0})
    for name in ("m", "n", "k", "world"):
        for value in ("8", 8.0):
            with pytest.raises(TypeError, match=f"explain: {name} is {value!r}, which is not an integer"):
                symm_overlap.explain("all_gather_matmul", **{"m": 8, "n": 8, "k": 8, "world": 2, name: value})
    with symm_overlap.force_path("pipelined", chunks=torch.tensor(2)):
        assert type(current().chunks) is int
    with pytest.raises(ValueError, match="no back end for 'meta': there are cpu, cuda"), symm_overlap.prepare():
        symm_overlap.all_gather(torch.empty(2, device="meta"), 0, me.group)
    good(me, "ag")


def test_what_surrounds_a_call_checks_its_arguments_too(ranks: Pool) -> None:
    ranks.run(2, prepare_badly)
