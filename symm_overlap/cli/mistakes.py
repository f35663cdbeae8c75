"""Report wrong arguments and files that cannot be read or written as one line on stderr, with exit code 2."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

Run = Callable[[argparse.Namespace], int]


def report_errors(command: str) -> Callable[[Run], Run]:
    """Decorate the function that runs ``symm-overlap command``: print its ValueErrors and OSErrors as one line.

    The decorated function then returns exit code 2 instead of raising. A BrokenPipeError is still raised.
    """

    def decorate(run: Run) -> Run:
        @functools.wraps(run)
        def wrapped(args: argparse.Namespace) -> int:
            try:
                return run(args)
            except BrokenPipeError:  # the reader of the output has gone, which is no mistake of the user
                raise
            except ValueError as error:
                why = str(error)
            except OSError as error:
                why = f"{error.filename}: {error.strerror}"
            print(f"symm-overlap {command}: {why}", file=sys.stderr)
            return 2

        return wrapped

    return decorate
