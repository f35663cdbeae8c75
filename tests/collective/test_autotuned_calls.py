"""`autotune` measures calls of every op as a program makes them. A file it cannot use only causes a warning."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from unittest import mock

import torch

import symm_overlap
from symm_overlap.collective import tuning
from symm_overlap.collective.choosing.candidates import Candidate
from symm_overlap.collective.choosing.chooser import choose
from symm_overlap.collective.choosing.tuned import Tuned, keys_of, tuned_for
from symm_overlap.collective.problem import problem
from symm_overlap.collective.tuning import calls, measuring, table
from symm_overlap.collective.tuning.measuring import candidates
from symm_overlap.runtime import TRAITS, state_of
from symm_overlap.settings import Settings
from tests.kernels.interpreted import kernels
from tests.ranks import Pool, Rank
from tests.transforms import choices

from .scaled_cases import rows_can_be_scaled
from .test_autotune import AG, LIKE_AG, RS, clocks, explained, forgetting, taken, tuned

BY_SIZES = [
    *((op, 12, 6, 4) for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")),
    *((op, 12, 6, 0) for op in ("all_gather", "reduce_scatter", "all_reduce")),
    *((op, 12, 6, 0) for op in ("all_gather_weight_matmul", "weight_grad_reduce_scatter")),
    *((op, 48, 16, 16) for op in ("all_gather_scaled_matmul", "scaled_matmul_reduce_scatter")),
]
SCALES = ((2, 16, 1), [(1, 16), (1, 32)]) if rows_can_be_scaled() else ((), [(), ()])
SHARD, WEIGHT = (torch.empty(rows, 4, dtype=torch.float64, device="meta") for rows in (5, 7))
NATURAL = [
    ("all_gather_matmul", (2, 3, 8), [(8, 6), (8, 3)], 1),
    ("all_gather_matmul", (4, 8), [(16, 6)], -1, {"return_A": False}),
    (
        "all_gather_matmul",
        torch.empty(5, 4, device="meta").double(),
        [torch.empty(7, 4, device="meta").double().t()],
        0,
    ),
    ("matmul_reduce_scatter", (2, 5, 8), (8, 6), "avg", 2),
    ("matmul_all_reduce", (3, 4), (4, 5), "sum", {"bias": (5,)}),
    ("all_gather", (3, 1, 4), 1),
    ("reduce_scatter", (2, 6), "sum", 1),
    ("all_reduce", [5, 2, 2], "avg"),
    ("all_gather_weight_matmul", (5, 12), (6, 7), 0),
    ("all_gather_weight_matmul", (2, 2, 8), (6, 8), 0, {"transpose": True}),
    ("weight_grad_reduce_scatter", (5, 2), (5, 6), "sum", 1),
    ("all_gather_scaled_matmul", (2, 16, 32), [(32, 16), (32, 32)], *SCALES, 1),
    ("scaled_matmul_reduce_scatter", (48, 16), (16, 16), (), (), "sum", 0, {"bias": (16,)}),
]


def really(me: Rank, file: Path) -> list[str]:
    with forgetting(me), mock.patch.multiple(measuring, _WARM_UP=1, _CALLS=1):
        found = tuned(me, file, [*BY_SIZES, *NATURAL])
        for shape, entry in zip([*BY_SIZES, *NATURAL], found, strict=True):
            assert taken(me, shape) == "{}/{}".format(*entry.best()), shape
        with mock.patch.object(tuning, "direct_access", return_value=False):
            (apart,) = tuned(me, file, [AG])
        assert [candidate.path for candidate, _ in apart.times] == ["sequential", "c10d", "c10d"]
        return list(map(str, found))


def test_every_op_is_really_measured_and_all_ranks_get_the_same(ranks: Pool, tmp_path: Path) -> None:
    first, *others = ranks.run(2, really, tmp_path / "table.json")
    assert all(found == first for found in others)
    assert {op for op, *_ in BY_SIZES} == set(calls._FUNCTIONS) == set(calls._ALIKE)
    assert all("sequential" in found and "pipelined, 1 chunk" in found for found in first)
    kept = json.loads((tmp_path / "table.json").read_text())["calls"]
    assert len(kept) == len(BY_SIZES) + len(NATURAL) + 1, "each call needs its own key"
    for key in kept:
        assert f"torch {torch.__version__}, symm_overlap {symm_overlap.__version__}" in key
        assert "2 ranks on cpu" in key
        assert "threads" in key


def alike(me: Rank, file: Path) -> list[str]:
    with forgetting(me), clocks(me, "pipelined/2"):
        tuned(me, file, [AG])
    with forgetting(me), clocks(me, "pipelined/4") as asked:
        tuned(me, file, [AG, LIKE_AG, ("all_gather_matmul", (8, 8), [(8, 4), (8, 4)], 0)])
        return [*asked, taken(me, AG), taken(me, (*LIKE_AG[:4], {"return_A": True})), explained(me, AG)]


def test_a_call_goes_by_itself_and_one_that_is_only_alike_by_the_first_of_its_kind(ranks: Pool, tmp_path: Path) -> None:
    """A call uses its own measurement or, if it has none, the first measurement of a call of its kind."""
    for asked, own, like, why in ranks.run(2, alike, tmp_path / "table.json"):
        assert asked == "all_gather_matmul", "the first two shapes are the same call, which is in the file"
        assert own == like == "pipelined/2"
        assert why.startswith("pipelined/2: measured")


def test_what_was_measured_for_the_very_call_goes_before_what_was_for_its_kind() -> None:
    """A measurement of the exact call has priority over one of another call of its kind."""
    very, other = (
        problem("all_gather_matmul", 8, 4, 4, torch.float32, 2, "cpu", arguments=(("return_A", value),))
        for value in (True, False)
    )
    own, alike = (Tuned(((Candidate(path, 1), 1.0),)) for path in ("pipelined", "sequential"))
    measured = {("cpu", str(very)): own, ("cpu", keys_of(other, None)[1]): alike}
    assert tuned_for(measured, very, None) is own
    assert tuned_for(measured, other, None) is tuned_for(measured, other, "any") is alike
    assert tuned_for(measured, problem("all_gather_matmul", 8, 4, 4, torch.float32, 2, "cuda"), None) is None


def test_sums_in_float32_are_of_another_kind_if_their_factors_are_not_float32() -> None:
    wide, half = (
        problem("matmul_reduce_scatter", 8, 4, 4, torch.float32, 2, "cpu", factors=factors)
        for factors in (torch.float32, torch.bfloat16)
    )
    measured = {("cpu", keys_of(wide, None)[1]): Tuned(((Candidate("pipelined", 2), 1.0),))}
    assert tuned_for(measured, wide, None) is not None
    assert tuned_for(measured, half, None) is None


def orders(me: Rank, file: Path) -> list[str]:
    """If the order of summation is free, a candidate for a whole sum may be one launch of the vendor's library.

    In rank order, the candidate of the same name is a different one, so its measurements are kept apart.
    """
    found, alike = [], ("matmul_reduce_scatter", (32, 8), (8, 8), "avg", 0)
    with forgetting(me):
        with clocks(me, "pipelined/2"), symm_overlap.sum_order("any"):
            tuned(me, file, [RS])
            found += [taken(me, RS), taken(me, alike)]
        found += [taken(me, RS), taken(me, alike)]
        with clocks(me, "pipelined/4"), symm_overlap.sum_order("rank"):
            tuned(me, file, [RS])
        found += [taken(me, RS), taken(me, alike)]
        with symm_overlap.sum_order("any"):
            found += [taken(me, RS), taken(me, alike)]
    return found


def test_what_was_measured_for_sums_in_any_order_is_not_for_those_in_rank_order(ranks: Pool, tmp_path: Path) -> None:
    """Measurements for sums in any order and for sums in rank order are independent."""
    inside, outside, measured = ["pipelined/2"] * 2, ["sequential/1"] * 2, ["pipelined/4"] * 2
    for found in ranks.run(2, orders, tmp_path / "table.json"):
        assert found == inside + outside + measured + inside


def test_ranks_that_cannot_reach_each_other_take_no_path_that_has_to() -> None:
    """Ranks without access to each other's memory ignore measurements of paths that need it."""
    call = problem("all_gather_matmul", 4096, 64, 64, torch.float32, 2, "cpu")
    times = {
        Candidate("pipelined", 2): 1.0,
        Candidate("fused", 2): 2.0,
        Candidate("c10d", 2): 3.0,
        Candidate("sequential", 1): 4.0,
    }
    for left in range(4):
        found = Tuned(tuple(list(times.items())[left:]))
        choices = [choose(call, Settings(), direct=direct, tuned=found) for direct in (True, False)]
        assert [each.candidate for each in choices] == [found.times[0][0], found.times[max(0, 2 - left)][0]]
    unknown = choose(call, Settings(), direct=False, tuned=Tuned(((Candidate("fused", 2), 1.0),)))
    assert (unknown.path, unknown.exchange) == ("c10d", "c10d")


def measures_spans(me: Rank) -> list[int]:
    rows = ("all_gather_matmul", (16, 64), [(64, 64)], 0)
    call = calls.wanted(rows, torch.float32, me.world)
    found = [Candidate("pipelined"), Candidate("pipelined", 1, 3)]
    with forgetting(me), choices() as made:
        measuring.measure(call, found, me.group, torch.device("cpu"), 1)
    return [choice.span for _, choice in made]


def test_each_span_is_measured(ranks: Pool) -> None:
    for spans in ranks.run(4, measures_spans):
        assert spans == [1, 1, 3, 3, 1, 1, 1, 3, 3, 3]


# --- the path fused


def fused(me: Rank, file: Path) -> list[str]:
    kernels("all_gather_matmul")
    with forgetting(me), mock.patch.multiple(measuring, _WARM_UP=1, _CALLS=1):
        (found,) = tuned(me, file, [AG], paths=["sequential", "fused"])
        assert {candidate.path for candidate, _ in found.times} == {"sequential", "fused"}
        with clocks(me, "fused/1"):
            (chosen,) = tuned(me, file, [AG], paths=["fused", "sequential"], again=True)
        path = taken(me, AG)
        (usual,) = tuned(me, file, [AG])
        return [path, str(chosen), str(usual)]


def test_fused_is_measured_on_cpu_where_it_is_named_and_then_taken(ranks: Pool, tmp_path: Path) -> None:
    """On CPU, the path fused is measured only if the caller names it. It is then used if it is the fastest."""
    for path, chosen, usual in ranks.run(2, fused, tmp_path / "table.json"):
        assert path == "fused/1"
        assert "fused, 1 chunk 1.125 ms" in chosen
        assert "fused" not in usual, "entries of the file for other sets of candidates must be ignored"


def test_gpus_measure_fused_where_there_is_a_kernel_and_take_it_where_there_is_one() -> None:
    """On GPUs, the path fused is measured and used for calls that have a kernel, if all ranks have kernels."""
    one = problem("all_gather_matmul", 8192, 4096, 4096, torch.bfloat16, 8, "cuda")
    last = problem("all_gather_matmul", 8192, 4096, 4096, torch.bfloat16, 8, "cuda", last_dim=True)
    can = [{"kernels": True}] * 8
    usual = tuning._usual_paths(can, True)
    assert Candidate("fused", 4) in candidates(one, usual)
    assert "fused" not in {each.path for each in candidates(last, usual)}
    assert Candidate("pipelined", 1, 3) in candidates(one, usual)
    assert all(each.span == 1 for each in candidates(last, usual))
    assert "fused" not in tuning._usual_paths([*can[1:], {"kernels": False}], True), "one rank has no kernels"
    assert tuning._usual_paths(can, False) == ["sequential", "c10d"]
    assert (TRAITS["cuda"].kernels, TRAITS["cpu"].kernels) == (True, False)
    found = Tuned(((Candidate("sequential", 1), 3.0), (Candidate("pipelined", 2), 2.0), (Candidate("fused", 2), 1.0)))
    assert (choose(one, Settings(), direct=True, tuned=found).exchange) == "fused"
    assert (choose(last, Settings(), direct=True, tuned=found).path) == "pipelined"
    only = Tuned(((Candidate("fused", 2), 1.0),))
    assert choose(last, Settings(), direct=True, tuned=only).predictions, "the measurement does not cover this call"


# --- files


def without_a_file(me: Rank, folder: Path) -> list[list[str]]:
    said = []
    bad = folder / "bad.json"
    if me.rank == 0:
        bad.write_text('{"format": "symm_overlap autotune 9", "calls": {}}')
        (folder / "file").write_text("")
    for file in (bad, folder / "file" / "table.json", Path("/proc/no/such.json"), folder):
        with forgetting(me), clocks(me, "pipelined/2"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (found,) = tuned(me, file, [AG])
            assert (taken(me, AG), found.best()) == ("pipelined/2", Candidate("pipelined", 2))
            said.append([str(each.message) for each in caught if "autotune" in str(each.message)])
    return said


def test_a_file_that_cannot_be_read_or_written_costs_a_warning_and_no_measurement(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(2, without_a_file, tmp_path)
    assert second == [[]] * 4
    for said, why in zip(first, ("is not a table", "NotADirectory", "/proc/no", "IsADirectory"), strict=True):
        assert why in said[0]
        assert "lost when this program ends" in said[-1]
    assert "measured again" in first[0][0]
    assert "autotune 9" in (tmp_path / "bad.json").read_text(), "it may be another version's file, so it must stay"


def test_what_another_device_or_version_has_measured_does_not_count(ranks: Pool, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    ranks.run(2, of_two_versions, file)
    keys = list(table.read(file))
    assert len(keys) == 2
    assert sum("symm_overlap 0.0.other" in key for key in keys) == 1


def of_two_versions(me: Rank, file: Path) -> None:
    for version in ("0.0.other", symm_overlap.__version__):
        with forgetting(me), clocks(me, "pipelined/2") as asked, mock.patch.object(tuning, "VERSION", version):
            tuned(me, file, [AG])
            assert asked == ["all_gather_matmul"]
            assert state_of(me.group).tuned


def at_once(me: Rank, file: Path) -> None:
    for number in range(20):
        table.add(file, {f"{me.rank} {number}": Tuned(((Candidate("sequential", 1), 1.0),))})


def test_programs_that_write_at_once_lose_nothing(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, at_once, tmp_path / "table.json")
    assert len(table.read(tmp_path / "table.json")) == 40
