"""The command line: one sub-command a module, each imported only when the command line names it or asks for help."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Every module here offers add_parser(subparsers) and run(args) -> exit code.
_COMMANDS = {
    "train": "symm_overlap.cli.train",
    "info": "symm_overlap.cli.info",
    "plan": "symm_overlap.cli.plan",
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
    """Runs one command and returns its exit code: 0 done, 1 failed, 2 wrong arguments, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # With the command known only its module is loaded; for --help and for mistakes argparse needs them all.
    named = [arguments[0]] if arguments and arguments[0] in _COMMANDS else list(_COMMANDS)
    args = build_parser(named).parse_args(arguments)
    try:
        return int(importlib.import_module(_COMMANDS[args.command]).run(args))
    except KeyboardInterrupt:
        print("symm-overlap: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
