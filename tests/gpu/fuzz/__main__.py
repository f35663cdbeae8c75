"""``python -m tests.gpu.fuzz``: see the package."""

from __future__ import annotations

import argparse

import torch

from tests.gpu.conditions import Conditions
from tests.gpu.conftest import WAITS, Worlds
from tests.gpu.fuzz.session import run_for
from tests.ranks import RankError

SLACK = 300.0  # seconds for the last program to end, or for a hang to be detected


def main() -> int:
    """Run random programs until the time is over or one of them fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.fuzz", description="Runs random programs of ops.")
    parser.add_argument("--seconds", type=float, default=60.0, help="time to run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all programs (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first program (default: 0)")
    parser.add_argument("--world", type=int, default=2, metavar="N", help="number of ranks (default: %(default)s)")
    parser.add_argument(
        "--waits", choices=tuple(WAITS), default="kernels", help="how streams wait (default: %(default)s)"
    )
    parser.add_argument("--random-sleeps", type=int, metavar="SEED", help="sleep at random before every step")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here; use the host GPU: python -m tests.host_gpu.run -m tests.gpu.fuzz")
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
