"""Wrong arguments, and files that cannot be read or written: one line on stderr, and exit code 2."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

Run = Callable[[argparse.Namespace], int]


def told(command: str) -> Callable[[Run], Run]:
    """For a function that runs ``symm-overlap command``: what it raises is told in one line."""

    def decorate(run: Run) -> Run:
        @functools.wraps(run)
        def wrapped(args: argparse.Namespace) -> int:
            try:
                return run(args)
            except BrokenPipeError:  # nobody reads the output any more: not a mistake
                raise
            except ValueError as error:
                why = str(error)
            except OSError as error:
                why = f"{error.filename}: {error.strerror}"
            print(f"symm-overlap {command}: {why}", file=sys.stderr)
            return 2

        return wrapped

    return decorate
