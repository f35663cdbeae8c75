"""A pool for tests that create process groups. To create a group, all ranks of the pool must take part."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Pool


@pytest.fixture(scope="package")
def four() -> Iterator[Pool]:
    """Four ranks that do not compare their calls. Comparing would take most of their time, and other tests do it."""
    with Pool(4, environment={"SYMM_OVERLAP_CHECK": None}) as pool:
        yield pool
