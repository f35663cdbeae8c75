"""The command line: one sub-command a module, each imported only when the command line names it or asks for help."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from symm_overlap.cli.signals import held

# Every module here offers add_parser(subparsers) and run(args) -> exit code.
_COMMANDS = {
    "train": "symm_overlap.cli.train",
    "info": "symm_overlap.cli.info",
    "plan": "symm_overlap.cli.plan",
    "schedule": "symm_overlap.cli.schedule",
    "fsdp": "symm_overlap.cli.fsdp",
}


def build_parser(commands: Sequence[str] = tuple(_COMMANDS)) -> argparse.ArgumentParser:
    """The parser of ``symm-overlap`` with the given sub-commands."""
    parser = argparse.ArgumentParser(
        prog="symm-overlap",
        description="Collective matmul that hides communication behind computation, on CPU and CUDA.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(_COMMANDS) + "}")
    for name in commands:
        importlib.import_module(_COMMANDS[name]).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 done, 1 failed, 2 wrong arguments, 130 interrupted, 141 nobody reads the output any more. The last two are
    128 + SIGINT and 128 + SIGPIPE, which is what a shell shows for programs that such a signal ends.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here, where a closed pipe can be handled, and not while the interpreter ends
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process is ending: a second Ctrl-C has nothing to say
        print("symm-overlap: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # As in ``symm-overlap plan ... | head -1``: end quietly. What is left in the buffers goes nowhere.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        return 128 + signal.SIGPIPE


def _run(arguments: list[str]) -> int:
    # With the command known only its module is loaded; for --help and for mistakes argparse needs them all.
    named = [arguments[0]] if arguments and arguments[0] in _COMMANDS else list(_COMMANDS)
    with held():  # Python prints a traceback for a Ctrl-C that comes in a callback of an import
        parser = build_parser(named)
    args = parser.parse_args(arguments)
    return int(importlib.import_module(_COMMANDS[args.command]).run(args))


if __name__ == "__main__":
    sys.exit(main())
