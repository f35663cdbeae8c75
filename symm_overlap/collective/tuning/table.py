"""The file of measured calls: JSON, a key for each device, topology, versions and kind of call.

A file is replaced as a whole, so a reader never sees a part of one. Programs that write at the same time take turns by
a lock on a file beside it. Where there are no locks one may lose what the other measured; it is then measured again.

No file is worth a measurement: what cannot be read is measured, and what cannot be written is told in a warning.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from operator import index
from pathlib import Path
from typing import IO, Any

from ...settings import PATHS
from ..tuned import Tuned

VARIABLE = "SYMM_OVERLAP_AUTOTUNE"
_FORMAT = "symm_overlap autotune 1"
_PATIENCE = 2.0  # seconds for others to write

Table = dict[str, Tuned]


def file_of(given: str | os.PathLike[str] | None) -> Path:
    """The file to use: the given one, or that of `VARIABLE`, or ``autotune.json`` in the user's cache folder."""
    if given is None:
        given = os.environ.get(VARIABLE) or None
    if given is not None:
        return Path(given)
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "symm_overlap" / "autotune.json"


def read_if_possible(given: str | os.PathLike[str] | None) -> Table:
    """What the file holds; nothing, and a warning, if it cannot be read."""
    with _or_warning("what it holds is measured again"):
        return read(file_of(given))
    return {}


def add_if_possible(given: str | os.PathLike[str] | None, table: Mapping[str, Tuned]) -> None:
    """Put what was measured into the file; a warning if that cannot be done."""
    with _or_warning("what was measured now is lost when this program ends"):
        add(file_of(given), table)


@contextmanager
def _or_warning(consequence: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:  # a user may have no home
        text = f"symm_overlap.autotune: {consequence}: {type(error).__name__}: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=5)


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
    with _in_turn(file):
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


@contextmanager
def _in_turn(file: Path) -> Iterator[None]:
    """Hold the lock beside a file, or go on without it where it cannot be had: it only spares others a measurement."""
    with ExitStack() as stack:
        with suppress(OSError):  # a file system without locks, or a lock of another user's
            lock = stack.enter_context(open(file.with_name(f".{file.name}.lock"), "a"))
            end = time.monotonic() + _PATIENCE
            while not _locked(lock) and time.monotonic() < end:
                time.sleep(0.01)
        yield


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
    if not times or not paths <= set(PATHS) or not good:
        raise ValueError(f"{entry} is no list of measured candidates")
    return Tuned(times)


def _bad(file: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{file} is no table of symm_overlap.autotune ({type(error).__name__}: {error}): remove it, or name another "
        f"file (file=, or {VARIABLE})"
    )
