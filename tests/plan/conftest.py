"""Fixtures of the tests of plans."""

import pytest

from symm_overlap.plan import ThreadStreams


@pytest.fixture
def streams():
    streams = ThreadStreams()
    yield streams
    streams.close()
