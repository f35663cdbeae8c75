"""Ranks that can make groups among themselves, which those of the session's pool cannot: a group is made by all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Pool


@pytest.fixture(scope="package")
def four() -> Iterator[Pool]:
    """Four ranks, which compare no calls: that takes them longer than all else, and other tests do."""
    with Pool(4, environment={"SYMM_OVERLAP_CHECK": None}) as pool:
        yield pool
