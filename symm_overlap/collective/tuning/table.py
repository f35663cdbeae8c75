"""The file of measured calls: JSON, with a key for each combination of devices, topology, versions and call.

A file is replaced as a whole, so a reader never sees half a file. Programs that write at the same time take turns with
a lock on a second file in the same folder. If the file system has no locks, one program's measurements may get lost,
and are then measured again.

A problem with the file never stops a measurement: if the file cannot be read, its calls are measured, and if it cannot
be written, there is a warning.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from operator import index
from pathlib import Path
from typing import IO, Any

from ...settings import PATHS
from ..choosing.candidates import Candidate
from ..choosing.tuned import Tuned

VARIABLE = "SYMM_OVERLAP_AUTOTUNE"
_FORMAT = "symm_overlap autotune 2"
_READ = "symm_overlap autotune 1", _FORMAT  # the first one has no spans
_PATIENCE = 2.0  # seconds for others to write

Table = dict[str, Tuned]


def file_of(given: str | os.PathLike[str] | None) -> Path:
    """Return the file to use: ``given``, or the file named by `VARIABLE`, or one in the user's cache folder."""
    if given is None:
        given = os.environ.get(VARIABLE) or None
    if given is not None:
        return Path(given)
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "symm_overlap" / "autotune.json"


def read_if_possible(given: str | os.PathLike[str] | None) -> Table:
    """Return the contents of the file. If it cannot be read, warn and return an empty table."""
    with _or_warning("the calls in the file are measured again, because it cannot be read"):
        return read(file_of(given))
    return {}


def add_if_possible(given: str | os.PathLike[str] | None, table: Mapping[str, Tuned]) -> None:
    """Add measurements to the file. If it cannot be written, warn."""
    with _or_warning("the new measurements are lost when this program ends, because the file cannot be written"):
        add(file_of(given), table)


@contextmanager
def _or_warning(consequence: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:  # a user may have no home
        text = f"symm_overlap.autotune: {consequence}: {type(error).__name__}: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=5)


def read(file: Path) -> Table:
    """Return the contents of the file; an empty table if the file does not exist.

    Raises:
        ValueError: the file does not have this format.
        OSError: the file cannot be read.
    """
    try:
        text = file.read_text()
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise _bad(file, error) from None
    try:
        found = json.loads(text)
        if found["format"] not in _READ:
            raise ValueError(f"its format is {found['format']!r}, not {_FORMAT!r}")
        return {str(key): decoded(entry) for key, entry in found["calls"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _bad(file, error) from None


def add(file: Path, table: Mapping[str, Tuned]) -> None:
    """Add measurements to the current contents of the file.

    Raises:
        ValueError, OSError: see `read`. OSError also if the file cannot be written.
    """
    file = file.resolve()  # replace the target of a link, not the link
    file.parent.mkdir(parents=True, exist_ok=True)
    with _in_turn(file):
        calls = {key: encoded(entry) for key, entry in sorted({**read(file), **table}.items())}
        name = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
        try:
            with open(name, "x") as out:  # unlike `tempfile`, with the permissions that new files get here
                json.dump({"format": _FORMAT, "calls": calls}, out, indent=1)
                out.write("\n")
            with suppress(FileNotFoundError):  # others may share the file
                os.chmod(name, file.stat().st_mode)
            os.replace(name, file)
        except BaseException:
            name.unlink(missing_ok=True)
            raise


@contextmanager
def _in_turn(file: Path) -> Iterator[None]:
    """Hold the lock of a file, or go on without it. Without the lock, another program may have to measure again."""
    with ExitStack() as stack:
        with suppress(OSError):  # a file system without locks, or a lock file of another user
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
    """Return an entry in its JSON form."""
    return [{**candidate._asdict(), "ms": time} for candidate, time in entry.times]


def decoded(entry: Any) -> Tuned:
    """Return the entry from its JSON form.

    Raises:
        ValueError, TypeError, KeyError: ``entry`` is not the JSON form of an entry.
    """
    times = tuple(
        (Candidate(str(one["path"]), index(one["chunks"]), index(one.get("span", 1))), float(one["ms"]))
        for one in entry
    )
    paths = {candidate.path for candidate, _ in times}
    whole = all(min(each.chunks, each.span) == 1 for each, _ in times)  # parts are cut or joined, not both
    good = whole and all(0 < ms < math.inf for _, ms in times)  # False for NaN too
    if not times or not paths <= set(PATHS) or not good:
        raise ValueError(f"{entry} is not a list of measured candidates")
    return Tuned(times)


def _bad(file: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{file} is not a table of symm_overlap.autotune ({type(error).__name__}: {error}): remove it, or name another "
        f"file (file=, or {VARIABLE})"
    )
