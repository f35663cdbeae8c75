"""Schedules with absurd numbers are rejected in a short time."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from symm_overlap.pipeline import Schedule, read_csv, verify
from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.verify.counts import MOST_MISSING


@pytest.mark.parametrize("text", ["0F0,0B0,0F999999999,0B999999999\n", "0F999999999\n"])
def test_one_mistyped_microbatch_is_told_at_once(text: str) -> None:
    began = time.monotonic()
    report = verify(read_csv(text))
    assert time.monotonic() - began < 5
    missing = [problem.text for problem in report.problems if problem.kind == "missing"]
    assert len(missing) == MOST_MISSING + 1
    assert "the schedule has 1000000000 microbatches. If that is wrong, an action has a wrong number" in missing[-1]


@pytest.mark.parametrize("pipelines", [0, -1, 3])
def test_pipelines_that_cannot_share_are_refused(pipelines: int) -> None:
    schedule: Schedule = replace(generate("1F1B", 2, 4), pipelines=pipelines)
    with pytest.raises(ValueError, match=rf"2 stages and 4 microbatches cannot be shared equally by {pipelines} pipe"):
        verify(schedule)
