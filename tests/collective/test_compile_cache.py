"""Groups of different sizes may share a folder of compiled graphs. A graph is reused only for its own world size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import symm_overlap
from symm_overlap import _torch
from tests.collective import reference as ref
from tests.ranks import Pool, Rank

Function = Callable[[Tensor, Tensor, str], Any]

WAYS: dict[str, Function] = {
    "ops": lambda A, B, name: (
        torch.ops.symm_overlap.fused_all_gather_matmul(A, [B], 0, name),
        torch.ops.symm_overlap.fused_matmul_reduce_scatter(A, B, "sum", 0, name),
        torch.ops.symm_overlap.all_gather(A, 1, name),
    ),
    "functions": lambda A, B, name: (
        symm_overlap.all_gather_matmul(A, [B], 0, name),
        symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, name),
        symm_overlap.reduce_scatter(A, "avg", 0, name),
    ),
    "torch.ops.symm_mem": lambda A, B, name: (
        torch.ops.symm_mem.fused_all_gather_matmul(A, [B], 0, name),
        torch.ops.symm_mem.fused_matmul_reduce_scatter(A, B, "sum", 0, name),
    ),
}


def compiled(me: Rank) -> dict[str, tuple[int, int]]:
    """Compile, compare with eager mode, and return the numbers of cache hits and misses for each of `WAYS`.

    Only rank 0 compiles. The others make the same calls without importing the compiler, which would take seconds.
    """
    symm_overlap.install_as_symm_mem()
    found = {}
    for way, function in WAYS.items():
        arguments = (
            ref.binary((8, 4), torch.float32, seed=me.rank),
            ref.binary((4, 6), torch.float32, seed=9),
            me.group_name,
        )
        if me.rank == 0:
            results, found[way] = compiled_and_counted(function, *arguments)
        else:
            results = function(*arguments)
        for result, expected in zip(
            *map(torch.utils._pytree.tree_leaves, (results, function(*arguments))), strict=True
        ):
            ref.same(result, expected)
    return found


def compiled_and_counted(function: Function, A: Tensor, B: Tensor, name: str) -> tuple[Any, tuple[int, int]]:
    import torch._inductor.config as inductor
    from torch._dynamo.utils import counters

    assert inductor.size_asserts
    counters.clear()
    _torch._in_cache_keys.clear()  # each way adds the size of the group itself
    torch.compiler.config.cache_key_tag = ""
    results = torch.compile(function, fullgraph=True, backend="inductor")(A, B, name)
    cache = counters["aot_autograd"]
    return results, (cache["autograd_cache_hit"], cache["autograd_cache_miss"])


@pytest.mark.slow
def test_graphs_in_one_folder_are_found_again_at_their_own_world_size_only(
    fresh_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for world, seen_before in ((2, False), (1, False), (4, False), (1, True)):
        pool = fresh_ranks(world, environment=environment)
        for way, (hits, misses) in pool.run(world, compiled, timeout=150)[0].items():
            assert (hits, misses) == ((1, 0) if seen_before else (0, 1)), (world, way)
        pool.kill()


def test_a_group_made_again_has_only_its_new_size_in_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """If old sizes stayed in the keys, processes that saw two sizes of a group in different orders could share keys."""
    monkeypatch.setattr(_torch, "_in_cache_keys", {})
    tags = []
    with torch.compiler.config.patch(cache_key_tag="mine"):
        for world in (2, 4, 2):
            _torch.add_to_cache_keys("tp", world)
            tags.append(torch.compiler.config.cache_key_tag)
    assert tags[0] == tags[2] == "mine [symm_overlap, in order: group tp of 2 ranks]"
    assert tags[1] == "mine [symm_overlap, in order: group tp of 4 ranks]"
