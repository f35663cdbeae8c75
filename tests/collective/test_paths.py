"""The rules by which the path of a call is chosen, one by one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from symm_overlap.blocks import force_path
from symm_overlap.collective.choosing.choice import Choice
from symm_overlap.collective.explain import explain
from symm_overlap.collective.problem import OPS
from symm_overlap.runtime import TRAITS
from symm_overlap.settings import environment

CPU_CHUNK_ROWS = TRAITS["cpu"].fewest_rows
CUDA_REDUCE_RANKS = TRAITS["cuda"].most_ranks_in_a_sum or 0

LARGE = {"m": 8192, "n": 4096, "k": 4096, "dtype": torch.bfloat16, "world": 4}


@pytest.fixture(autouse=True)
def no_path_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SYMM_OVERLAP_PATH", raising=False)
    environment.cache_clear()
    yield
    monkeypatch.undo()
    environment.cache_clear()


def large(device: str = "cuda", **changes: object) -> Choice:
    return explain("all_gather_matmul", **{**LARGE, "device": device, **changes})


# --- the rules


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_world_of_one_is_single_whatever_else(op: str, device: str) -> None:
    for direct in (True, False):
        choice = explain(op, m=8, n=8, k=8, world=1, device=device, direct=direct)
        assert choice.path == "single"
        assert "world size 1" in choice.reason
    with force_path("c10d"):
        assert explain(op, m=8, n=8, k=8, world=1, device=device).path == "single"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_that_cannot_reach_each_other_use_c10d(op: str, device: str) -> None:
    for size in (2, 8192):
        choice = explain(op, m=size, n=size, k=size, world=2, device=device, direct=False)
        assert choice.path == "c10d"
        assert "several hosts" in choice.reason


def test_cpu_chunks_of_few_rows_are_sequential() -> None:
    few, enough = (large("cpu", m=4 * rows) for rows in (CPU_CHUNK_ROWS - 1, CPU_CHUNK_ROWS))
    assert few.path == "sequential"
    assert f"{CPU_CHUNK_ROWS - 1} rows a rank are under {CPU_CHUNK_ROWS}" in few.reason
    assert enough.path == "pipelined"
    assert f"{CPU_CHUNK_ROWS} rows" in enough.reason


@pytest.mark.parametrize("size", [2, 8192])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
def test_without_a_matmul_a_cpu_has_nothing_to_hide_the_collective_behind(op: str, size: int) -> None:
    choice = explain(op, m=size, n=size, world=2, device="cpu")
    assert (choice.path, choice.exchange, choice.whole) == ("sequential", "planned", True)
    assert "no matmul" in choice.reason


@pytest.mark.parametrize("path", ["pipelined", "c10d"])
def test_a_part_is_never_cut_into_more_pieces_than_it_has_rows(path: str) -> None:
    with force_path(path, chunks=10**5):
        assert [large("cpu", m=m).chunks for m in (0, 4, 32)] == [1, 1, 8]


@pytest.mark.parametrize("op", ["all_reduce", "matmul_all_reduce"])
@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_sums_all_of_a_small_all_reduce(op: str, world: int) -> None:
    most = TRAITS["cpu"].most_bytes_in_one_shot
    rows = most // world // 4  # a row is one float32 of a rank's partial result
    with force_path("sequential"):
        small, large = (
            explain(op, m=m, n=1, k=1, world=world, dtype=torch.float32, device="cpu") for m in (rows, rows + 1)
        )
    assert (small.one_shot, large.one_shot) == (True, False)
    assert "every rank sums all of it" in str(small)
    assert "every rank" not in str(large)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "matmul_reduce_scatter"])
def test_only_an_all_reduce_can_be_one_shot(op: str) -> None:
    assert not explain(op, m=4, n=1, k=1, world=2, device="cpu").one_shot


@pytest.mark.parametrize("path", ["pipelined", "c10d"])
def test_a_forced_path_is_not_replaced_by_one_shot(path: str) -> None:
    with force_path(path):
        assert not explain("all_reduce", m=4, n=1, world=2, device="cpu").one_shot


def test_an_all_reduce_shares_out_rows_that_do_not_divide() -> None:
    few, enough = (
        explain("matmul_all_reduce", m=m, n=8, k=8, world=2, device="cpu")
        for m in (2 * CPU_CHUNK_ROWS - 2, 2 * CPU_CHUNK_ROWS - 1)
    )
    assert (few.path, enough.path) == ("sequential", "pipelined")


def test_along_the_last_dimension_a_chunk_has_all_rows() -> None:
    assert large("cpu", m=CPU_CHUNK_ROWS).path == "sequential"
    assert large("cpu", m=CPU_CHUNK_ROWS, last_dim=True).path == "pipelined"
    assert large("cpu", m=CPU_CHUNK_ROWS - 1, last_dim=True).path == "sequential"


def test_a_cpu_uses_one_stream_and_one_chunk_and_a_gpu_two_streams_and_a_copy_stream() -> None:
    cpu, gpu = large("cpu"), large("cuda")
    assert (cpu.chunks, cpu.compute, cpu.copy) == (1, ("compute0",), "compute0")
    assert (gpu.path, gpu.compute, gpu.copy) == ("pipelined", ("compute0", "compute1"), "copy")


def test_c10d_cuts_large_parts_in_two() -> None:
    assert large("cpu", m=4 * (2 * CPU_CHUNK_ROWS - 1), direct=False).chunks == 1
    assert large("cpu", m=4 * 2 * CPU_CHUNK_ROWS, direct=False).chunks == 2


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_more_ranks_than_a_gpu_can_sum_over_are_refused_before_they_begin(op: str, direct: bool) -> None:
    def of(world: int, device: str = "cuda") -> Choice:
        return explain(op, m=8 * world, n=8, k=8, world=world, device=device, direct=direct)

    of(CUDA_REDUCE_RANKS)
    of(CUDA_REDUCE_RANKS + 1, "cpu")
    if "reduce" in op:
        with pytest.raises(ValueError, match=f"{op}: on CUDA at most 256 ranks can sum .* there are 257"):
            of(CUDA_REDUCE_RANKS + 1)
    else:
        of(CUDA_REDUCE_RANKS + 1)


# --- overriding them


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("path", ["sequential", "pipelined", "c10d"])
def test_force_path_decides_and_says_so(path: str, device: str) -> None:
    with force_path(path):
        for m in (4, 1 << 20):
            assert large(device, m=m).path == path
            assert large(device, m=m).reason == "forced"
    assert large(device, m=4).reason != "forced"


def test_force_path_nests_and_ends_with_its_block_and_thread() -> None:
    found = []
    with force_path("c10d"):
        with force_path("sequential", chunks=3):
            assert (large().path, large().chunks) == ("sequential", 1)
            thread = threading.Thread(target=lambda: found.append(large().path))
            thread.start()
            thread.join()
        assert large().path == "c10d"
        with pytest.raises(KeyError), force_path("sequential"):
            raise KeyError
        assert large().path == "c10d"
    assert found == ["pipelined"]


def test_chunks_and_streams_can_be_forced_without_a_path() -> None:
    with force_path(None, chunks=5, streams=2):
        choice = large("cpu")
    assert (choice.path, choice.chunks) == ("pipelined", 5)
    assert (choice.compute, choice.copy) == (("compute0", "compute1"), "copy")
    assert "rows a rank" in choice.reason
    with force_path(None, streams=1):
        assert (large("cuda").compute, large("cuda").copy) == (("compute0",), "copy")


def test_the_environment_decides_for_a_whole_program_and_force_path_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMM_OVERLAP_PATH", "sequential")
    environment.cache_clear()
    assert large().path == "sequential"
    with force_path("c10d"):
        assert large().path == "c10d"
    monkeypatch.setenv("SYMM_OVERLAP_PATH", "")
    environment.cache_clear()
    assert large().path == "pipelined"


# --- errors


@pytest.mark.parametrize("path", ["single", "Pipelined", ""])
def test_a_path_that_there_is_not_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="allowed are sequential, pipelined, fused, c10d"), force_path(path):
        pass
    monkeypatch.setenv("SYMM_OVERLAP_PATH", path)
    environment.cache_clear()
    if path:
        with pytest.raises(
            ValueError, match=f"SYMM_OVERLAP_PATH is '{path}': allowed are sequential, pipelined, fused, c10d"
        ):
            large()


def test_chunks_and_streams_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks is 0"), force_path(None, chunks=0):
        pass
    for streams in (0, 3):
        with (
            pytest.raises(ValueError, match=f"streams is {streams}; allowed are 1 and 2"),
            force_path(None, streams=streams),
        ):
            pass


def test_pipelined_cannot_be_forced_on_ranks_that_cannot_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with force_path("pipelined"), pytest.raises(ValueError, match="cannot reach each other's memory; allowed here"):
        large(direct=False)
    monkeypatch.setenv("SYMM_OVERLAP_PATH", "pipelined")
    environment.cache_clear()
    with pytest.raises(ValueError, match="cannot reach each other's memory"):
        large(direct=False)
    with force_path("sequential"):
        assert large(direct=False).path == "sequential"


# --- what is shown


def test_a_choice_prints_its_path_its_shape_and_its_reason() -> None:
    assert str(large("cpu")) == (
        "pipelined (1 chunk a rank, streams: compute0): 2048 rows a rank: consumed straight out of the peer's memory"
    )
    assert str(large(world=1)) == "single: world size 1: there is no peer to communicate with"
    first, header, *candidates, fused = str(large()).splitlines()
    assert first.startswith("pipelined (span 2, streams: compute0, compute1, copy): predicted ")
    assert header.split() == ["predicted", "in", "ms", "for", "H100", "total", "matmul", "moves", "meets", "host"]
    names = [line[:32].strip() for line in candidates]
    assert names[:2] == ["sequential", "pipelined, 1 chunk"]
    assert "pipelined, span 2" in names
    assert {name.partition(",")[0] for name in names} == {"sequential", "pipelined", "fused"}
    assert fused.strip().startswith("fused is used only if it is forced")
    assert all(float(number) >= 0 for line in candidates for number in line[32:].split())
