"""The example of docs/profile.md prints what the page says."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import ROOT
from tests.docs.two_ranks import printed_on_two_ranks


def test_the_example_prints_a_row_for_each_op(tmp_path: Path) -> None:
    first, second = printed_on_two_ranks((ROOT / "tests/docs/examples/exposed_step.py").read_text(), tmp_path)
    page = (ROOT / "docs/profile.md").read_text()
    by_torchs_profiler = ("USDT", "ERROR:")  # the second if torch was built for CUDA and there is no GPU
    lines = [line for line in first.splitlines() if not line.startswith(by_torchs_profiler)]
    assert lines[0] == "this process: rank 0, CPU"
    shown = [
        line for line in lines if line.startswith(("this process", "    calls", "  all_gather", "  matmul_reduce"))
    ]
    assert len(shown) == 4
    assert all(f"{line}\n" in page for line in shown)
    assert "rank 1" not in second
