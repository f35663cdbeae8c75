"""Fixtures for all tests: rank processes (see tests/ranks.py), and checks at the end of the session."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests import leftovers
from tests.rank_process import COMPILER
from tests.ranks import Pool

pytest_plugins = ["tests.at_most", "tests.outcomes"]

MAX_WORLD = 5

os.environ.update(COMPILER)  # before any test imports the compiler, and for every process that a test starts
torch.set_num_threads(1)  # several test processes share the machine, and idle OpenMP threads would spin


def pytest_collection_finish() -> None:
    """Prevent the garbage collector from scanning all modules and all cached plans again and again.

    Tests that verify plans create millions of small objects. Without this, they would take twice the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail the session if it leaves processes or shared memory. This fixture is torn down after all others."""
    leftovers.mark_session()
    before = leftovers.shared_memory()
    yield
    assert not leftovers.wait_until_empty(leftovers.processes, seconds=10)
    assert not leftovers.wait_until_empty(lambda: leftovers.shared_memory() - before, seconds=10)


@pytest.fixture(scope="session")
def session_ranks() -> Iterator[Pool]:
    pool = Pool(MAX_WORLD, groups=[tuple(range(world)) for world in range(1, MAX_WORLD)])
    yield pool
    pool.close()


@pytest.fixture
def ranks(session_ranks: Pool) -> Pool:
    """The session's CPU ranks, for world sizes 1 to 5: ``ranks.run(world, function, *args)``."""
    return session_ranks


_lanes = itertools.count(1000)  # far from the lane numbers that tests on their own ranks choose


@pytest.fixture
def fresh_lane() -> Callable[[], int]:
    """Return a function that creates lane numbers that no test of this session has used: ``lane = fresh_lane()``.

    For tests that count the calls of a lane, or after which the ranks of the lane are out of step.
    """
    return lambda: next(_lanes)


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[..., Pool]]:
    """Yield a function that starts pools for one test: ``fresh_ranks(world, environment=..., groups=..., device=...)``.

    For tests that kill ranks, or need their own environment or a GPU. The pools are killed when the test ends.
    """
    pools: list[Pool] = []

    def start(world: int, **options: Any) -> Pool:
        pools.append(Pool(world, **options))
        return pools[-1]

    yield start
    for pool in pools:
        pool.kill()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("GPU tests")
    group.addoption(
        "--gpu-tests-on",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: a dry run on CPU of those GPU tests that need nothing else of a GPU",
    )
    group.addoption(
        "--rank-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="deadline for one function on all ranks (default 120); increase it for tools that slow tests down",
    )
    group.addoption(
        "--random-sleeps",
        type=int,
        metavar="SEED",
        help="GPU tests: sleep for a random time before every step of a plan",
    )
    group.addoption(
        "--cuda-sanitizer",
        action="store_true",
        help="GPU tests: look for races between streams, as with TORCH_CUDA_SANITIZER=1",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_cpu = config.getoption("--gpu-tests-on") == "cpu"
    missing = None if torch.cuda.is_available() and not on_cpu else pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None and missing is not None and not (on_cpu and marker.kwargs.get("cpu_too")):
            item.add_marker(missing)
