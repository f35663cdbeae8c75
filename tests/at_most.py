"""The option ``--at-most N``: of a test with more than N cases, run N, which are the same ones in every run.

For runs that look for what another version of torch breaks, after all cases have passed with the first version.
"""

from __future__ import annotations

import zlib
from itertools import groupby

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--at-most", type=int, metavar="N", help="run at most N cases of each parametrised test")


@pytest.hookimpl(trylast=True)  # after -m and -k, so that the N cases are among those that these options select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most = config.getoption("--at-most")
    if most is None:
        return
    if most < 1:
        raise pytest.UsageError(f"--at-most {most}: give at least 1")
    kept = {
        item
        for _, cases in groupby(items, lambda item: item.nodeid.partition("[")[0])
        for item in sorted(cases, key=by_chance)[:most]
    }
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def by_chance(case: pytest.Item) -> int:
    """Return a number to sort cases by. In the order of the cases, every N-th one may have the same op or dtype."""
    return zlib.crc32(case.nodeid.encode())
