"""Read what Nsight Systems has recorded: the database that ``nsys export --type sqlite`` writes.

The tables and columns are those of NVIDIA's "SQLite Export Schema Reference". Tables are missing if nothing of the kind
was recorded. Ranges come from NVTX, so the program must run under `torch.autograd.profiler.emit_nvtx`.

Tools that convert reports write such databases too, so values may be missing or odd. What has no time is left out.

Unless asked to do otherwise, Nsight Systems records a replay of a CUDA graph as a whole. Its time counts as other work,
since the kernels in it are not known.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Hashable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from .attribution import Launch, Range, Run, is_ours, recordings
from .recording import Recording
from .roles import WHOLE_GRAPH

_MILLI = 1e-6  # the database counts nanoseconds
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}  # CUpti_ActivityMemcpyKind
_SUFFIX = re.compile(r", (?:seq|op_id|sizes|input_op_ids) = .*$")  # what emit_nvtx adds to a range's name
_NEVER = 1e20  # no clock shows this
_ACTIVITY = "CUPTI_ACTIVITY_KIND_"


def read_nsight(path: Path) -> list[Recording]:
    """Return the recordings of a database, one for each GPU of each process.

    Raises:
        ValueError: the file is not such a database, or a table has no times.
    """
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.text_factory = lambda text: text.decode("utf-8", "replace")  # names are not always UTF-8
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            if "StringIds" not in tables:
                raise ValueError(f"{path} has no table StringIds: give a database that nsys has exported")
            reader = _Reader(path, database, tables)
            runs = list(reader.runs())
            return recordings(reader.ranges(), reader.launches(), runs, reader.devices(), {}, str(path))
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} is not a database of Nsight Systems: {error}") from None


class _Reader:
    def __init__(self, path: Path, database: sqlite3.Connection, tables: set[str]) -> None:
        self._path, self._database, self._tables = path, database, tables
        texts = database.execute("SELECT id, value FROM StringIds")
        self._texts: dict[Any, str] = {number: text for number, text in texts if isinstance(text, str)}

    def _rows(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield these columns of a table: nothing if there is no such table, and None for a column that it lacks.

        Raises:
            ValueError: the column that it lacks is a time.
        """
        if table in self._tables:
            known = {row[1] for row in self._database.execute(f"PRAGMA table_info({table})")}
            for name in {"start", "end"}.intersection(columns) - known:
                raise ValueError(
                    f"{self._path}: table {table} has no column {name!r}: give a database that nsys has exported"
                )
            chosen = ", ".join(f'"{name}"' if name in known else "NULL" for name in columns)
            yield from self._database.execute(f"SELECT {chosen} FROM {table}")

    def ranges(self) -> Iterator[Range]:
        """Yield our ranges. A range that had not ended when the recording did has no end."""
        for thread, start, end, text, number in self._rows(
            "NVTX_EVENTS", "globalTid", "start", "end", "text", "textId"
        ):
            name = _SUFFIX.sub("", text if isinstance(text, str) and text else self._texts.get(number, ""))
            if is_ours(name) and (times := _times(start, end)) is not None:
                yield Range(_process_of(thread), thread, *times, name)

    def launches(self) -> Iterator[Launch]:
        """Yield the calls of the runtime and of the driver."""
        for table in ("RUNTIME", "DRIVER"):
            for thread, start, number in self._rows(_ACTIVITY + table, "globalTid", "start", "correlationId"):
                if (times := _times(start, start)) is not None:
                    yield Launch(_process_of(thread), thread, times[0], number)

    def runs(self) -> Iterator[Run]:
        """Yield kernels, copies and fills."""
        columns = "globalPid", "deviceId", "streamId", "start", "end", "correlationId"
        kernels = self._rows(f"{_ACTIVITY}KERNEL", *columns, "demangledName", "shortName")
        for *where, long, short in kernels:
            yield from _run(where, self._texts.get(long) or self._texts.get(short) or "a kernel")
        for *where, direction in self._rows(f"{_ACTIVITY}MEMCPY", *columns, "copyKind"):
            yield from _run(where, f"Memcpy {_COPIES.get(direction, '')}")
        for *where, _ in self._rows(f"{_ACTIVITY}MEMSET", *columns, "value"):
            yield from _run(where, "Memset")
        for *where, _ in self._rows(f"{_ACTIVITY}GRAPH_TRACE", *columns, "graphId"):
            yield from _run(where, WHOLE_GRAPH)

    def devices(self) -> dict[Hashable, str]:
        """Return the names of the GPUs, also by their numbers in each process if the database has these."""
        found: dict[Hashable, str] = dict(self._rows("TARGET_INFO_GPU", "id", "name"))
        for process, number, gpu in list(self._rows("TARGET_INFO_CUDA_DEVICE", "pid", "cudaId", "gpuId")):
            if gpu in found:
                found[process, number] = found[gpu]
        return found


def _times(start: Any, end: Any) -> tuple[float, float] | None:
    """Return these times in milliseconds; None if they are not a beginning and an end."""
    if not all(isinstance(each, (int, float)) and abs(each) < _NEVER for each in (start, end)) or end < start:
        return None
    return start * _MILLI, end * _MILLI


def _process_of(thread: Any) -> int:
    """Return the process of a global identifier: the upper half of its lowest 48 bits. The lower half is the thread."""
    return (thread >> 24) & 0xFFFFFF if isinstance(thread, int) else 0


def _run(where: Sequence[Any], name: str) -> Iterator[Run]:
    """Yield the activity, if it has times."""
    process, device, stream, start, end, number = where
    device, number = (each if isinstance(each, int) else other for each, other in ((device, 0), (number, -1)))
    if (times := _times(start, end)) is not None:
        yield Run(_process_of(process), device, f"stream {stream}", *times, name, number)
