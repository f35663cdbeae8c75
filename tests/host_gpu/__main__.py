"""Runs the GPU tests on the host GPU: ``python -m tests.host_gpu [arguments of pytest]``."""

from __future__ import annotations

import sys

from tests.host_gpu.run import become

PROCESSES = 3
"""Of pytest. Most tests wait for most of their time; each process has rank processes of its own."""


def main(arguments: list[str]) -> None:
    """Becomes pytest."""
    given = arguments or ["-n", str(PROCESSES), "--dist", "worksteal"]
    names = [] if any("tests/gpu" in argument for argument in arguments) else ["tests/gpu"]
    options = ["-q", "-p", "tests.host_gpu.selection", "-m", "gpu", "--capture=sys"]
    become(["-m", "pytest", *options, *given, *names])


if __name__ == "__main__":
    main(sys.argv[1:])
