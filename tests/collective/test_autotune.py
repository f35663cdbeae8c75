"""After `autotune`, every rank uses what the group has measured, never a result that only one rank has read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import symm_overlap
from symm_overlap.collective import tuning
from symm_overlap.collective.choosing.candidates import Candidate
from symm_overlap.collective.choosing.chooser import choose
from symm_overlap.collective.choosing.tuned import Tuned
from symm_overlap.collective.problem import problem
from symm_overlap.collective.tuning import calls, measuring, table
from symm_overlap.runtime import state_of
from symm_overlap.settings import Settings, current
from tests.ranks import Pool, Rank

AG, RS = ("all_gather_matmul", 16, 8, 8), ("matmul_reduce_scatter", 32, 8, 8)
LIKE_AG = ("all_gather_matmul", (8, 8), [(8, 8)], 0, {"return_A": False})


@contextmanager
def forgetting(me: Rank) -> Iterator[None]:
    """Undo at the end of the block what `autotune` has put in force inside, because other tests use the same group."""
    state = state_of(me.group)
    try:
        yield
    finally:
        state.tuned.clear()
        state.forget_routes()


@contextmanager
def clocks(me: Rank, quickest: str) -> Iterator[list[str]]:
    """Replace measurements, and yield a list to which the measured ops are added.

    On rank 0, ``quickest`` takes 1 ms and other candidates take 3 ms. On rank r > 0, they take 1 + r/8 and 2 + r/8 ms.
    """
    asked = []

    def measured(call: calls.Wanted, found: list[Candidate], *rest: object) -> list[float]:
        asked.append(call.op)
        return [
            (1.0 if f"{each.path}/{each.chunks}" == quickest else 3.0 if me.rank == 0 else 2.0) + me.rank / 8
            for each in found
        ]

    with mock.patch.object(tuning, "measure", measured):
        yield asked


def tuned(me: Rank, file: Path, shapes: list[calls.Shape], **how: Any) -> list[Tuned]:
    return symm_overlap.autotune(shapes, me.group, dtype=torch.float32, file=file, rounds=1, **how)


def explained(me: Rank, shape: calls.Shape) -> str:
    op, m, n, k = shape
    choice = symm_overlap.explain(op, m=m, n=n, k=k, dtype=torch.float32, group=me.group, device="cpu")
    return f"{choice.path}/{choice.chunks}: {choice.reason}"


def taken(me: Rank, shape: calls.Shape) -> str:
    """Return the path that a call really uses."""
    call = calls.wanted(shape, torch.float32, me.world)
    measuring.measure(call, [Candidate("sequential", 1)], me.group, torch.device("cpu"), 1)  # adds other routes
    with torch.no_grad():
        call.make(torch.device("cpu"))(me.group)
    free = current().routing
    taken = [route.choice for (_, _, routing, _), route in state_of(me.group).routes.items() if routing == free]
    return f"{taken[-1].path}/{taken[-1].chunks}"


def in_force(me: Rank, file: Path) -> list[object]:
    with forgetting(me):
        before = taken(me, AG), taken(me, RS)
        with clocks(me, "pipelined/4") as asked:
            found = tuned(me, file, [AG])
            after = taken(me, AG), taken(me, RS)
            first = list(asked)
        return [before, after, first, dict(found[0].times), explained(me, AG)]


def test_a_group_takes_what_it_has_measured_and_the_slowest_rank_counts(ranks: Pool, tmp_path: Path) -> None:
    """The group uses the path with the shortest time, where the time of a path is that of the slowest rank."""
    for before, after, asked, times, why in ranks.run(2, in_force, tmp_path / "table.json"):
        assert before == ("sequential/1", "sequential/1")
        assert after == ("pipelined/4", "sequential/1")
        assert asked == ["all_gather_matmul"]
        # Rank 0 measures 3 ms where rank 1 measures 2.125 ms.
        assert times == {
            Candidate("sequential", 1): 3.0,
            Candidate("pipelined", 1): 3.0,
            Candidate("pipelined", 2): 3.0,
            Candidate("pipelined", 4): 1.125,
        }
        assert why.startswith("pipelined/4: measured by autotune: sequential 3.000 ms; pipelined, 1 chunk 3.000 ms")


def another_run(me: Rank, file: Path) -> list[object]:
    """Each rank passes a file of its own. Only the file of rank 0 may be read."""
    with forgetting(me):
        mine = file if me.rank == 0 else file.with_name(f"of rank {me.rank}.json")
        with clocks(me, "pipelined/2"):
            tuned(me, mine, [AG])
        state_of(me.group).tuned.clear()
        state_of(me.group).forget_routes()
        if me.rank:
            other = {
                key: Tuned(((Candidate("sequential", 1), 1.0), (Candidate("pipelined", 2), 9.0)))
                for key in table.read(file)
            }
            table.add(mine, other)
        with clocks(me, "sequential/1") as asked:
            silent = taken(me, AG)  # the file has no effect before the call of autotune
            found = tuned(me, mine, [AG])
            kept = list(asked), taken(me, AG)
            if me.rank:
                mine.write_text("no table")
            again = tuned(me, mine, [AG, RS], again=True)
            anew = list(asked), taken(me, AG)
        return [silent, found[0].best(), kept, again[0].best(), anew]


def test_what_rank_0_finds_in_its_file_is_not_measured_again(ranks: Pool, tmp_path: Path) -> None:
    for silent, best, kept, again, anew in ranks.run(2, another_run, tmp_path / "table.json"):
        assert silent == "sequential/1"
        assert best == Candidate("pipelined", 2)
        assert kept == ([], "pipelined/2")
        assert again == Candidate("sequential", 1)
        assert anew == (["all_gather_matmul", "matmul_reduce_scatter"], "sequential/1")


# --- settings that override it


def test_what_is_forced_goes_before_what_was_measured() -> None:
    call = problem("all_gather_matmul", 4096, 64, 64, torch.float32, 2, "cpu")
    found = Tuned(((Candidate("sequential", 1), 2.0), (Candidate("pipelined", 4), 1.0)))

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
        with clocks(me, "sequential/1"):
            if me.rank == 0:
                with mock.patch.object(tuning, "measure", side_effect=MemoryError("no room")):
                    note(lambda: tuned(me, file, [AG]))
            else:
                note(lambda: tuned(me, file, [AG]))
        note(lambda: tuned(me, file, [list(AG) if me.rank else ("all_gather_matmul", 15, 8, 8)]))
        note(lambda: tuned(me, file, [RS], paths=["fast"]))
        note(lambda: tuned(me, file, [("all_gather", 16, 8, 0)], paths=["fused"]))
        with symm_overlap.prepare():
            note(lambda: tuned(me, file, [AG]))
        assert not state_of(me.group).tuned
        assert not file.exists()
        with clocks(me, "sequential/1"):
            tuned(me, file, [AG])  # the ranks are still in step
    return found


def test_every_rank_raises_when_one_has_failed_and_nothing_is_in_force(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(2, errors, tmp_path / "table.json")
    assert first[0] == second[0]
    assert "rank 0 gives ([Wanted(op='all_gather_matmul', arguments=(('A_shard', Described(shape=(8, 8)" in first[0]
    assert "rank 1 gives ([Wanted(op='matmul_reduce_scatter'" in first[0]
    assert first[1] == "no room"
    assert second[1] == "autotune: rank 0 has failed: MemoryError: no room"
    assert second[2] == f"autotune: rank 0 has failed: ValueError: {first[2]}", "its arguments are bad on rank 0 alone"
    assert "allowed" not in first[2]
    assert "sequential, pipelined, fused, c10d" in first[3]
    assert "there is no kernel for all_gather" in first[4]
    assert "autotune() inside symm_overlap.prepare()" in first[5]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (("all_gather_matmul", 16, 8), "give m, n and k"),
        (3, "is not a shape"),
        ("all_gather", "is not a shape"),
        (("all_gather", (16, 8)), "missing a required argument: 'gather_dim': give the arguments of all_gather"),
        (("all_gather", (16, 8), 0, {"dim": 1}), "unexpected keyword argument 'dim'"),
        (("all_gather_weight_matmul", 16, 8, 8), "and for an op in which a weight travels"),
        (("gather", 16, 8, 8), "op is 'gather': allowed are all_gather_matmul"),
        (("all_gather_matmul", 15, 8, 8), "15 rows cannot be divided evenly among 2 ranks"),
        (("all_gather_matmul", 0, 8, 8), "ints from 1 on"),
        (("all_gather", 16, 8, 8), "k is 0 for an op without a matmul"),
        (("matmul_all_reduce", 16, 8, 0), "ints from 1 on"),
    ],
)
def test_what_is_no_shape_is_refused(shape: tuple[object, ...], message: str) -> None:
    """An invalid shape raises an error that says what is wrong."""
    with pytest.raises((ValueError, TypeError), match=message):
        calls.wanted(shape, torch.float32, 2)  # type: ignore[arg-type]


CALL = '{"format": "symm_overlap autotune 1", "calls": {"a": [{"path": "%s", "chunks": %s, "ms": %s}]}}'
SPAN = '{"format": "symm_overlap autotune 2", "calls": {"a": [{"path": "c10d", "chunks": %s, "span": %s, "ms": 1}]}}'


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
        *(SPAN % values for values in ((1, 0), (1, -2), (1, 1.5), (1, "null"), (4, 2))),
        "[" * 10**5,
        *(CALL % ("c10d", chunks, ms) for chunks, ms in ((1, "NaN"), (1, -5), (2.9, 1), ("Infinity", 1))),
    ],
    ids=range(18),
)
def test_a_file_that_is_no_table_is_refused_and_stays(text: str, tmp_path: Path) -> None:
    """A file that is not a valid table raises an error and is not changed."""
    file = tmp_path / "table.json"
    file.write_bytes(text.encode("latin-1"))
    for call in (lambda: table.read(file), lambda: table.add(file, {})):
        with pytest.raises(ValueError, match="is not a table of symm_overlap"):
            call()
    assert file.read_bytes() == text.encode("latin-1")
    assert {each.name for each in tmp_path.iterdir()} == {"table.json", ".table.json.lock"}


def test_a_table_is_added_to_and_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "new" / "table.json"
    one = Tuned(((Candidate("sequential"), 0.1),))
    two = Tuned(((Candidate("c10d", 2), 1.0), (Candidate("pipelined", 1, 3), 2.5)))
    table.add(file, {"a": one})
    before = file.stat().st_ino
    assert file.stat().st_mode == file.with_name(".table.json.lock").stat().st_mode, "other users may read it too"
    table.add(file, {"b": two, "c": one})
    assert table.read(file) == {"a": one, "b": two, "c": one}
    assert file.stat().st_ino != before, "a new file must replace it, as someone may be reading it"
    with mock.patch.object(os, "replace", side_effect=OSError("full")), pytest.raises(OSError, match="full"):
        table.add(file, {"a": two})
    assert table.read(file)["a"] == one
    assert {each.name for each in file.parent.iterdir()} == {"table.json", ".table.json.lock"}


def test_a_table_is_written_where_its_lock_cannot_be_opened(tmp_path: Path) -> None:
    one = Tuned(((Candidate("sequential", 1), 0.1),))
    (tmp_path / ".table.json.lock").mkdir()  # cannot be opened, like another user's lock, even by root
    table.add(tmp_path / "table.json", {"a": one})
    assert table.read(tmp_path / "table.json") == {"a": one}


def test_the_file_is_the_given_one_or_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.delenv(table.VARIABLE, raising=False)
    assert table.file_of(None) == Path("/caches/symm_overlap/autotune.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert table.file_of(None) == Path.home() / ".cache/symm_overlap/autotune.json"
    monkeypatch.setenv(table.VARIABLE, "/elsewhere.json")
    assert table.file_of(None) == Path("/elsewhere.json")
    assert table.file_of("/given.json") == Path("/given.json")
