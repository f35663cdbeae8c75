"""The file of measured calls: JSON, a key for each device, topology, versions and kind of call.

A file is replaced as a whole, so a reader never sees a part of one. Of two programs that write at the same time one may
lose what the other measured; it is then measured again.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import Any

from ..tuned import Tuned

VARIABLE = "SYMM_OVERLAP_AUTOTUNE"
_FORMAT = "symm_overlap autotune 1"

Table = dict[str, Tuned]


def file_of(given: str | os.PathLike[str] | None) -> Path:
    """The file to use: the given one, or that of `VARIABLE`, or ``autotune.json`` in the user's cache folder."""
    if given is None:
        given = os.environ.get(VARIABLE) or None
    if given is not None:
        return Path(given)
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "symm_overlap" / "autotune.json"


def read(file: Path) -> Table:
    """What the file holds; nothing if there is none.

    Raises:
        ValueError: it is no such file.
        OSError: it cannot be read.
    """
    try:
        text = file.read_text()
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise _bad(file, error) from None
    try:
        found = json.loads(text)
        if found["format"] != _FORMAT:
            raise ValueError(f"its format is {found['format']!r}, not {_FORMAT!r}")
        return {str(key): decoded(entry) for key, entry in found["calls"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _bad(file, error) from None


def add(file: Path, table: Mapping[str, Tuned]) -> None:
    """Put what was measured into the file, beside what it holds by now.

    Raises:
        ValueError, OSError: see `read`; or it cannot be written.
    """
    file = file.resolve()  # a link stays one
    file.parent.mkdir(parents=True, exist_ok=True)
    calls = {key: encoded(entry) for key, entry in sorted({**read(file), **table}.items())}
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w") as out:
            json.dump({"format": _FORMAT, "calls": calls}, out, indent=1)
            out.write("\n")
        with suppress(FileNotFoundError):  # others may share the file
            os.chmod(name, file.stat().st_mode)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def encoded(entry: Tuned) -> list[dict[str, Any]]:
    """An entry as JSON has it."""
    return [{"path": path, "chunks": chunks, "ms": time} for (path, chunks), time in entry.times]


def decoded(entry: Any) -> Tuned:
    """The entry that JSON has.

    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    times = tuple(((str(one["path"]), index(one["chunks"])), float(one["ms"])) for one in entry)
    paths = {path for (path, _), _ in times}
    good = all(chunks >= 1 and 0 < ms < math.inf for (_, chunks), ms in times)  # False for NaN too
    if not times or not paths <= {"sequential", "pipelined", "c10d"} or not good:
        raise ValueError(f"{entry} is no list of measured candidates")
    return Tuned(times)


def _bad(file: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{file} is no table of symm_overlap.autotune ({type(error).__name__}: {error}): remove it, or name another "
        f"file (file=, or {VARIABLE})"
    )
