"""A table with several faults at once has a report."""

from __future__ import annotations

import pytest

from symm_overlap.pipeline import read_csv
from symm_overlap.pipeline.verify import TRANSPORTS, verify


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_computed_twice_has_a_report(transport: str) -> None:
    """Rank 0 waits for a gradient that rank 1 would compute in two places, of which it reaches only the first."""
    report = verify(read_csv("0F0,0I0,0F1\n1F0,1I0,1F1,1B0\n"), transport=transport)
    assert "duplicated: 1B0 computes both gradients, so no other may compute one" in str(report)
