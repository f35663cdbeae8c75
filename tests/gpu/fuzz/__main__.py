"""``python -m tests.gpu.fuzz``: see the package."""

from __future__ import annotations

import argparse

import torch

from tests.gpu.conditions import Conditions
from tests.gpu.conftest import WAITS, Worlds
from tests.gpu.fuzz.session import run_for
from tests.ranks import RankError

SLACK = 300.0  # seconds for the last program, and for a hang to show


def main() -> int:
    """Runs random programs until the time is over, or until one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.fuzz", description="Runs random programs of ops.")
    parser.add_argument("--seconds", type=float, default=60.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of all programs (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first program (default: 0)")
    parser.add_argument("--world", type=int, default=2, metavar="N", help="ranks (default: %(default)s)")
    parser.add_argument("--waits", choices=tuple(WAITS), default="kernels", help="default: %(default)s")
    parser.add_argument("--random-sleeps", type=int, metavar="SEED", help="sleep before every step of a plan")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here: run it on the host GPU, python -m tests.host_gpu.run -m tests.gpu.fuzz")
    worlds = Worlds("cuda", Conditions(given.random_sleeps), given.seconds + SLACK)
    try:
        counts = worlds.run(given.world, run_for, given.seed, given.first, given.seconds, waits=given.waits)
    except RankError as error:
        print(error)
        return 1
    worlds.close()
    print(f"world {given.world}, seed {given.seed}, waits by {given.waits}: {counts[0]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
