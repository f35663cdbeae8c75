"""Databases of Nsight Systems, and ranges of calls, with odd values, as other tools and other versions write them."""

from __future__ import annotations

import math
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from symm_overlap.profile import read, report
from symm_overlap.profile.compare import compare
from tests.profile.traces import nsight, program, require_sound, write_chrome

ODD = (None, "", "x", b"\xff", -1, 3.5, 1e300, -1e300, math.inf, 1 << 62)
ACTIVITIES = [f"CUPTI_ACTIVITY_KIND_{name}" for name in ("RUNTIME", "KERNEL", "MEMCPY")]


@pytest.mark.parametrize("seed", range(20))
def test_odd_values_are_left_out(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    path = tmp_path / "trace.sqlite"
    nsight(path, *program(4))
    with closing(sqlite3.connect(path)) as database:
        for table in ("StringIds", "NVTX_EVENTS", *ACTIVITIES):
            database.execute(f"CREATE TABLE free AS SELECT * FROM {table}")  # without constraints
            database.execute(f"DROP TABLE {table}")
            database.execute(f"ALTER TABLE free RENAME TO {table}")
            for column in [row[1] for row in database.execute(f"PRAGMA table_info({table})")]:
                for (row,) in database.execute(f"SELECT rowid FROM {table}").fetchall():
                    if source.random() < 0.02 and (table, column) != ("StringIds", "id"):
                        database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (source.choice(ODD), row))
        database.commit()
    require_sound(read(path))


def test_a_name_that_is_not_utf8_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.sqlite"
    nsight(path, *program())
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE StringIds SET value = cast(x'67654dfc' AS TEXT) WHERE value = 'gemm of the model'")
        database.commit()
    (recording,) = read(path)
    assert "geM\ufffd" in [each.name for each in recording.activities]
    assert len(recording.calls) == 2


def test_a_kernel_that_ends_before_it_begins_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.sqlite"
    nsight(path, *program())
    before = len(read(path)[0].activities)
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = start - 1 WHERE rowid = 1")
        database.commit()
    assert len(read(path)[0].activities) == before - 1


@pytest.mark.parametrize("column", ["start", "end"])
def test_a_table_without_times_is_rejected(column: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.sqlite"
    nsight(path, *program())
    with closing(sqlite3.connect(path)) as database:
        database.execute(f'ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME COLUMN "{column}" TO other')
        database.commit()
    with pytest.raises(ValueError, match=f"trace.sqlite: table CUPTI_ACTIVITY_KIND_KERNEL has no column '{column}'"):
        read(path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("device=cuda", "device=xpu"),
        ("rank=2 ", "rank=7 "),
        ("world=4", "world=1"),
        ("world=4", "world=999999999"),
        ("chunks=1", "chunks=0"),
        ("copies=1", "copies=0"),
        ("span=1", "span=0"),
    ],
)
def test_a_call_that_no_rank_can_have_made_has_no_prediction(before: str, after: str, tmp_path: Path) -> None:
    ran, ranges = program(2)
    path = tmp_path / "trace.json"
    call = next(each for each in ranges if before in each.name)
    changed = call._replace(name=call.name.replace(before, after))
    write_chrome(path, ran, [changed if each == call else each for each in ranges])
    (recording,) = read(path)
    predicted = [compare(recording, index) is not None for index in range(len(recording.calls))]
    assert sorted(predicted) == [False, True]
    assert "no steps are compared" not in report([recording], steps=True)


def test_times_that_no_clock_shows_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    event = '{"ph": "X", "cat": "kernel", "name": "gemm", "args": {"device": 0}, "ts": %s, "dur": %s}'
    events = [event % times for times in ((1, 2), ("1e308", "1e308"), ("-1e308", 5), (1, "1e300"))]
    path.write_text(f'{{"traceEvents": [{", ".join(events)}]}}')
    (recording,) = read(path)
    assert [(each.start, each.end) for each in recording.activities] == [(0.0, 0.002)]
