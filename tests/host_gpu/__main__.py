"""Run the GPU tests on the host GPU: ``python -m tests.host_gpu [arguments of pytest]``."""

from __future__ import annotations

import sys

from tests.host_gpu.run import become

PROCESSES = 3
"""Number of pytest processes. Most tests spend most of their time waiting. Each process has its own rank processes."""


def main(arguments: list[str]) -> None:
    """Replace this process by pytest on the host GPU."""
    given = arguments or ["-n", str(PROCESSES), "--dist", "worksteal"]
    names = [] if any("tests/gpu" in argument for argument in arguments) else ["tests/gpu"]
    options = ["-q", "-p", "tests.host_gpu.selection", "-m", "gpu", "--capture=sys"]
    become(["-m", "pytest", *options, *given, *names])


if __name__ == "__main__":
    main(sys.argv[1:])
