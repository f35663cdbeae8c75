"""`autotune`: every rank takes what the group has measured, and nothing that one rank has read alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

import symm_overlap
from symm_overlap.collective import tuning
from symm_overlap.collective.chooser import choose
from symm_overlap.collective.problem import problem
from symm_overlap.collective.tuned import Tuned
from symm_overlap.collective.tuning import measuring, table
from symm_overlap.runtime import state_of
from symm_overlap.settings import Settings, current
from tests.ranks import Pool, Rank

AG, RS = ("all_gather_matmul", 16, 8, 8), ("matmul_reduce_scatter", 32, 8, 8)
EVERY_OP = [(op, 8, 6, 4 if "matmul" in op else 0) for op in measuring._CALL]


@contextmanager
def forgetting(me: Rank) -> Iterator[None]:
    """What is put in force inside goes with the block: other tests use the group too."""
    state = state_of(me.group)
    try:
        yield
    finally:
        state.tuned.clear()
        state.routes.clear()


@contextmanager
def clocks(me: Rank, quickest: str) -> Iterator[list[str]]:
    """One candidate is measured to be the quickest: on rank 0 by much, on the others by little, or not at all."""
    asked = []

    def measured(problem: object, found: list[tuple[str, int]], *rest: object) -> list[float]:
        asked.append(problem.op)  # type: ignore[attr-defined]
        return [
            (1.0 if f"{path}/{chunks}" == quickest else 3.0 if me.rank == 0 else 2.0) + me.rank / 8
            for path, chunks in found
        ]

    with mock.patch.object(tuning, "measure", measured):
        yield asked


def tuned(me: Rank, file: Path, shapes: list[measuring.Shape], **how: bool) -> dict[measuring.Shape, Tuned]:
    return symm_overlap.autotune(shapes, me.group, dtype=torch.float32, file=file, rounds=1, **how)


def explained(me: Rank, shape: measuring.Shape) -> str:
    op, m, n, k = shape
    choice = symm_overlap.explain(op, m=m, n=n, k=k, dtype=torch.float32, group=me.group, device="cpu")
    return f"{choice.path}/{choice.chunks}: {choice.reason}"


def taken(me: Rank, shape: measuring.Shape) -> str:
    """The path that a call really takes."""
    op, m, n, k = shape
    call = problem(op, m, n, k, torch.float32, me.world, "cpu")
    measuring.measure(call, [("sequential", 1)], me.group, torch.device("cpu"), 1)  # makes other routes
    inputs = measuring._inputs(call, torch.device("cpu"))
    measuring._CALL[op](inputs, me.group)
    free = current().routing
    (found,) = {
        f"{route.choice.path}/{route.choice.chunks}"
        for (made, _, routing, _), route in state_of(me.group).routes.items()
        if (made.op, made.m, made.n, made.k, routing) == (op, m, n, k, free)
    }
    return found


def in_force(me: Rank, file: Path) -> list[object]:
    with forgetting(me):
        before = taken(me, AG), taken(me, RS)
        with clocks(me, "pipelined/4") as asked:
            found = tuned(me, file, [AG])
            after = taken(me, AG), taken(me, RS)
            first = list(asked)
        return [before, after, first, dict(found[AG].times), explained(me, AG)]


def test_a_group_takes_what_it_has_measured_and_the_slowest_rank_counts(ranks: Pool, tmp_path: Path) -> None:
    for before, after, asked, times, why in ranks.run(2, in_force, tmp_path / "table.json"):
        assert before == ("sequential/1", "sequential/1")
        assert after == ("pipelined/4", "sequential/1")
        assert asked == ["all_gather_matmul"]
        # Rank 0 takes 3 where rank 1 takes 2 and an eighth.
        assert times == {("sequential", 1): 3.0, ("pipelined", 1): 3.0, ("pipelined", 2): 3.0, ("pipelined", 4): 1.125}
        assert why.startswith("pipelined/4: measured by autotune: sequential 3.000 ms, pipelined with 1 chunk 3.000 ms")


def another_run(me: Rank, file: Path) -> list[object]:
    """A file of this rank's own: only rank 0's may be read."""
    with forgetting(me):
        mine = file if me.rank == 0 else file.with_name(f"of rank {me.rank}.json")
        with clocks(me, "pipelined/2"):
            tuned(me, mine, [AG])
        state_of(me.group).tuned.clear()
        state_of(me.group).routes.clear()
        if me.rank:
            other = {key: Tuned(((("sequential", 1), 1.0), (("pipelined", 2), 9.0))) for key in table.read(file)}
            table.add(mine, other)
        with clocks(me, "sequential/1") as asked:
            silent = taken(me, AG)  # a file alone changes nothing
            found = tuned(me, mine, [AG])
            kept = list(asked), taken(me, AG)
            if me.rank:
                mine.write_text("no table")
            again = tuned(me, mine, [AG, RS], again=True)
            anew = list(asked), taken(me, AG)
        return [silent, found[AG].best(), kept, again[AG].best(), anew]


def test_what_rank_0_finds_in_its_file_is_not_measured_again(ranks: Pool, tmp_path: Path) -> None:
    for silent, best, kept, again, anew in ranks.run(2, another_run, tmp_path / "table.json"):
        assert silent == "sequential/1"
        assert best == ("pipelined", 2)
        assert kept == ([], "pipelined/2")
        assert again == ("sequential", 1)
        assert anew == (["all_gather_matmul", "matmul_reduce_scatter"], "sequential/1")


def really(me: Rank, file: Path) -> list[str]:
    with forgetting(me):
        found = tuned(me, file, EVERY_OP)
        c10d = []
        with mock.patch.object(tuning, "direct_access", return_value=False):
            c10d = [entry.times[-1][0] for entry in tuned(me, file, [AG]).values()]
        # Each is really in force.
        for (op, m, n, k), entry in found.items():
            assert taken(me, (op, m, n, k)) == "{}/{}".format(*entry.best())
        return [*(str(entry) for entry in found.values()), str(c10d)]


def test_every_op_is_really_measured_and_all_ranks_get_the_same(ranks: Pool, tmp_path: Path) -> None:
    first, *others = ranks.run(3, really_in_threes, tmp_path / "table.json")
    assert all(found == first for found in others)
    assert len(first) == len(EVERY_OP) + 1
    assert all("sequential" in found and "pipelined with 2 chunks" in found for found in first[:-1])
    assert first[-1] == "[('c10d', 2)]"
    kept = json.loads((tmp_path / "table.json").read_text())["calls"]
    assert len(kept) == len(EVERY_OP) + 1
    for key in kept:
        assert f"torch {torch.__version__}, symm_overlap {symm_overlap.__version__}" in key
        assert "3 ranks on cpu" in key
        assert "threads" in key


def really_in_threes(me: Rank, file: Path) -> list[str]:
    with (
        mock.patch(f"{__name__}.EVERY_OP", [(op, 12, n, k) for op, _, n, k in EVERY_OP]),
        mock.patch(f"{__name__}.AG", ("all_gather_matmul", 12, 8, 8)),
    ):
        return really(me, file)


# --- what goes before it


def test_what_is_forced_goes_before_what_was_measured() -> None:
    call = problem("all_gather_matmul", 4096, 64, 64, torch.float32, 2, "cpu")
    found = Tuned(((("sequential", 1), 2.0), (("pipelined", 4), 1.0)))

    def path(**forced: object) -> str:
        choice = choose(call, Settings(**forced), direct=True, tuned=found)  # type: ignore[arg-type]
        return f"{choice.path}/{choice.chunks}"

    assert path() == "pipelined/4"
    assert path(path="sequential") == "sequential/1"
    assert path(chunks=2) == "pipelined/2"
    assert path(streams=1) == "pipelined/1"


# --- what can go wrong


def errors(me: Rank, file: Path) -> list[str]:
    found = []

    def note(call: Callable[[], object]) -> None:
        with symm_overlap.timeout(20), pytest.raises((ValueError, RuntimeError, OSError, MemoryError)) as raised:
            call()
        found.append(str(raised.value))

    with forgetting(me):
        note(lambda: tuned(me, file, [AG] if me.rank == 0 else [RS]))
        bad = file.with_name("bad.json")
        if me.rank == 0:
            bad.write_text('{"format": "other"}')
        note(lambda: tuned(me, bad, [AG]))
        note(lambda: tuned(me, Path("/proc/no/such.json"), [AG]))
        with clocks(me, "sequential/1"):
            if me.rank == 0:
                with mock.patch.object(tuning, "measure", side_effect=MemoryError("no room")):
                    note(lambda: tuned(me, file, [AG]))
            else:
                note(lambda: tuned(me, file, [AG]))
        note(lambda: tuned(me, file, [list(AG) if me.rank else ("all_gather_matmul", 15, 8, 8)]))
        assert not state_of(me.group).tuned
        with clocks(me, "sequential/1"):
            tuned(me, file, [AG])  # nothing is out of step
    return found


def test_every_rank_raises_when_one_has_failed_and_nothing_is_in_force(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(2, errors, tmp_path / "table.json")
    assert first[0] == second[0]
    assert "rank 0 gives ([('all_gather_matmul', 16, 8, 8)]" in first[0]
    assert "rank 1 gives ([('matmul_reduce_scatter', 32, 8, 8)]" in first[0]
    assert "bad.json is no table of symm_overlap.autotune" in first[1]
    assert "its format is 'other'" in first[1]
    assert "SYMM_OVERLAP_AUTOTUNE" in first[1]
    assert second[1] == f"autotune: rank 0 has failed: ValueError: {first[1]}"
    assert "/proc/no" in first[2]
    assert second[2].startswith("autotune: rank 0 has failed: ")
    assert first[3] == "no room"
    assert second[4] == f"autotune: rank 0 has failed: ValueError: {first[4]}", "its arguments are bad on rank 0 alone"
    assert second[3] == "autotune: rank 0 has failed: MemoryError: no room"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (("all_gather_matmul", 16, 8), "is no shape"),
        (("gather", 16, 8, 8), "op is 'gather': allowed are all_gather_matmul"),
        (("all_gather_matmul", 15, 8, 8), "15 rows cannot be shared out among 2 ranks"),
        (("all_gather_matmul", 0, 8, 8), "ints from 1 on"),
        (("all_gather", 16, 8, 8), "without a matmul, k is 0"),
        (("matmul_all_reduce", 16, 8, 0), "ints from 1 on"),
    ],
)
def test_what_is_no_shape_is_refused(shape: tuple[object, ...], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        measuring.described(shape, torch.float32, 2, "cpu")  # type: ignore[arg-type]


CALL = '{"format": "symm_overlap autotune 1", "calls": {"a": [{"path": "%s", "chunks": %s, "ms": %s}]}}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "\xff",
        '{"format": "symm_overlap autotune 1", "calls": {"a": []}}',
        CALL % ("x", 1, 1),
        CALL % ("c10d", 0, 1),
        '{"format": "symm_overlap autotune 1", "calls": 3}',
        "[" * 10**5,
        *(CALL % ("c10d", chunks, ms) for chunks, ms in ((1, "NaN"), (1, -5), (2.9, 1), ("Infinity", 1))),
    ],
    ids=range(13),
)
def test_a_file_that_is_no_table_is_refused_and_stays(text: str, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_bytes(text.encode("latin-1"))
    for call in (lambda: table.read(file), lambda: table.add(file, {})):
        with pytest.raises(ValueError, match="is no table of symm_overlap"):
            call()
    assert file.read_bytes() == text.encode("latin-1")
    assert list(tmp_path.iterdir()) == [file]


def test_a_table_is_added_to_and_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "new" / "table.json"
    one, two = Tuned(((("sequential", 1), 0.1),)), Tuned(((("c10d", 2), 1.0), (("sequential", 1), 2.5)))
    table.add(file, {"a": one})
    before = file.stat().st_ino
    table.add(file, {"b": two, "c": one})
    assert table.read(file) == {"a": one, "b": two, "c": one}
    assert file.stat().st_ino != before, "another file in its place: who reads the old one reads on"
    with mock.patch.object(os, "replace", side_effect=OSError("full")), pytest.raises(OSError, match="full"):
        table.add(file, {"a": two})
    assert table.read(file)["a"] == one
    assert list(file.parent.iterdir()) == [file]


def test_the_file_is_the_given_one_or_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.delenv(table.VARIABLE, raising=False)
    assert table.file_of(None) == Path("/caches/symm_overlap/autotune.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert table.file_of(None) == Path.home() / ".cache/symm_overlap/autotune.json"
    monkeypatch.setenv(table.VARIABLE, "/elsewhere.json")
    assert table.file_of(None) == Path("/elsewhere.json")
    assert table.file_of("/given.json") == Path("/given.json")
