"""Fixtures for all tests: rank processes (see tests/ranks.py) and what must be true when the session ends."""

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

pytest_plugins = ["tests.outcomes"]

MAX_WORLD = 5

os.environ.update(COMPILER)  # before any test imports the compiler, and for every process that a test starts
torch.set_num_threads(1)  # several test processes share the machine, and idle threads of OpenMP spin


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking at all modules, and at all cached plans, again and again.

    Tests that verify plans make millions of small objects, and would take twice the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails the session if it leaves processes or shared memory. Automatic, so torn down after all others."""
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
    """The session's CPU ranks, for worlds 1 to 5: ``ranks.run(world, function, *args)``."""
    session_ranks.close_if_crowded()
    return session_ranks


_lanes = itertools.count(1000)  # far from those that tests on ranks of their own choose


@pytest.fixture
def fresh_lane() -> Callable[[], int]:
    """Makes lane numbers that no test of this session has used: ``lane = fresh_lane()``.

    For tests that count the calls of a lane, or after which it is out of step.
    """
    return lambda: next(_lanes)


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[..., Pool]]:
    """Makes pools for one test only, ``fresh_ranks(world, environment=..., groups=..., device=...)``.

    For tests that kill ranks, need their own environment, or a GPU. They are killed when the test ends.
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
        help="cpu: a dry run, of those GPU tests of which only the device is missing",
    )
    group.addoption(
        "--rank-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="for one function on all ranks; more for tools that slow it down (default 120)",
    )
    group.addoption("--random-sleeps", type=int, metavar="SEED", help="GPU tests: sleep before every step of a plan")
    group.addoption(
        "--cuda-sanitizer", action="store_true", help="GPU tests: look for races of streams, as TORCH_CUDA_SANITIZER=1"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_cpu = config.getoption("--gpu-tests-on") == "cpu"
    missing = None if torch.cuda.is_available() and not on_cpu else pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None and missing is not None and not (on_cpu and marker.kwargs.get("cpu_too")):
            item.add_marker(missing)
