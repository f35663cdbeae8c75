"""The command line. Each sub-command is a module, imported only if the command line names it or needs all of them."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from symm_overlap._version import VERSION
from symm_overlap.cli.signals import signals_blocked

# Each of these modules has add_parser(subparsers) and run(args) -> exit code.
_COMMANDS = {
    "train": "symm_overlap.cli.train",
    "info": "symm_overlap.cli.info",
    "plan": "symm_overlap.cli.plan",
    "schedule": "symm_overlap.cli.schedule",
    "fsdp": "symm_overlap.cli.fsdp",
    "profile": "symm_overlap.cli.profile",
}


def build_parser(commands: Sequence[str] = tuple(_COMMANDS)) -> argparse.ArgumentParser:
    """Build the parser of ``symm-overlap`` with the given sub-commands."""
    parser = argparse.ArgumentParser(
        prog="symm-overlap",
        description="Collective matmul that hides communication behind computation, on CPU and CUDA.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(_COMMANDS) + "}")
    for name in commands:
        importlib.import_module(_COMMANDS[name]).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    The exit code is 0 for success, 1 for a failure, such as a full disk, 2 for wrong arguments, 130 after Ctrl-C, and
    141 if the reader of the output has closed the pipe. The last two are 128 + SIGINT and 128 + SIGPIPE, as a shell
    reports them.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:  # it is None if the command was started without one
                sys.stdout.flush()  # here, where errors are handled below, and not while the interpreter ends
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the ending
        print("symm-overlap: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader has gone, as in ``symm-overlap plan ... | head -1``. End quietly: discard what is still buffered.
        _discard(1, 2)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is not None:
            raise
        print(f"symm-overlap: input or output failed: {error.strerror or error}", file=sys.stderr)
        _discard(1)
        return 1


def _discard(*outputs: int) -> None:
    """Discard what is still buffered for these outputs, and what will be written to them."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in outputs:
        os.dup2(nowhere, output)


def _run(arguments: list[str]) -> int:
    # If the command is known, only its module is loaded. For --help and for wrong commands argparse needs all of them.
    named = [arguments[0]] if arguments and arguments[0] in _COMMANDS else list(_COMMANDS)
    with signals_blocked():  # without it, Python prints a traceback if Ctrl-C arrives in a callback of an import
        parser = build_parser(named)
    args = parser.parse_args(arguments)
    return int(importlib.import_module(_COMMANDS[args.command]).run(args))


if __name__ == "__main__":
    sys.exit(main())
