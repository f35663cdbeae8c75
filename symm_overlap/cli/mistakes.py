"""Report wrong arguments and files that cannot be read or written as one line on stderr, with exit code 2."""

from __future__ import annotations

import argparse
import errno
import functools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

Run = Callable[[argparse.Namespace], int]


def report_errors(command: str) -> Callable[[Run], Run]:
    """Decorate the function that runs ``symm-overlap command``: print its errors as one line.

    These are ValueErrors, OSErrors of files, and numbers that are too large for a float or for the memory. The
    decorated function then returns exit code 2 instead of raising. An OSError that names no file is of the output, and
    is still raised.
    """

    def decorate(run: Run) -> Run:
        @functools.wraps(run)
        def wrapped(args: argparse.Namespace) -> int:
            try:
                return run(args)
            except ValueError as error:
                why = str(error)
            except OSError as error:
                if error.filename is None:
                    raise
                why = f"{error.filename}: {error.strerror}"
            except (OverflowError, MemoryError):
                why = "a number is too large: the result does not fit a float, or the memory"
            print(f"symm-overlap {command}: {why}", file=sys.stderr)
            return 2

        return wrapped

    return decorate


def write_file(path: Path, text: str) -> None:
    """Write a text as UTF-8. Characters of file names that are not UTF-8 are escaped.

    Raises:
        OSError: the file cannot be written. The error names it, even if the disk is full.
    """
    try:
        path.write_bytes(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def require_writable(path: Path) -> None:
    """Raise the error that `write_file` would raise, as far as it is known before a long computation.

    Raises:
        OSError: ``path`` is a folder, its folder does not exist, or the permission to write is missing.
    """
    if path.is_dir():
        wrong = errno.EISDIR
    elif not path.parent.is_dir():
        wrong = errno.ENOENT
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        wrong = errno.EACCES
    else:
        return
    raise OSError(wrong, os.strerror(wrong), str(path))


def require_distinct(**files: Path | None) -> None:
    """Raise if two options name the same regular file, of which one would overwrite the other.

    Args:
        files: the files by the names of their options, without the hyphens. None is an option that is not given.

    Raises:
        ValueError: two are the same file. The message names both options.
    """
    options: dict[Path, str] = {}
    for option, path in files.items():
        if path is None or (path.exists() and not path.is_file()):  # such as /dev/null, which keeps nothing
            continue
        other = options.setdefault(path.resolve(), option)
        if other != option:
            raise ValueError(f"{other} and {option} are the same file, {path}: one would overwrite the other")


def require_duration(option: str, value: float) -> float:
    """Return ``value``, in milliseconds.

    Raises:
        ValueError: it is negative, infinite or NaN.
    """
    if not 0 <= value < math.inf:  # False for NaN too
        raise ValueError(f"{option} is {value}: give a duration in milliseconds, 0 or more and finite")
    return value


def require_at_most(most: int, count: int, what: str) -> None:
    """Raise if ``count`` is above ``most``, where the command would take minutes and much memory.

    Raises:
        ValueError: there are more. The message says what is counted.
    """
    if count > most:
        raise ValueError(f"{what} is {count:.6g}: this command works up to {most}")
