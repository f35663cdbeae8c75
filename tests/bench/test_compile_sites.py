"""Compare the sites that two passes fuse in the same graphs. Ours fuses all that torch's fuses. A miss is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import compile_sites
from symm_overlap.inductor import custom_pass
from symm_overlap.inductor.patterns import PATTERNS
from tests.quick import one_in

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", one_in(2, ["MLP, all-reduce", "MLP, dim 1", "block, batch 2"]))
def test_ours_fuses_what_torchs_pass_fuses_and_the_page_says_how_many(name: str) -> None:
    graphs = compile_sites.sites_of(name, 4)
    assert all(graph.torchs <= graph.ours == graph.all for graph in graphs)
    assert bool(graphs[1].torchs) == (name != "MLP, all-reduce"), "torch's pass did not run"
    if not torch.__version__.startswith("2.13."):  # the page shows what this version's own pass fuses
        return
    (line,) = [line for line in compile_sites.table([compile_sites.row(name, 4, graphs)]).splitlines() if name in line]
    page = [" ".join(line.split()) for line in (ROOT / "docs/compile.md").read_text().splitlines()]
    assert " ".join(line.replace(" 4 ", " 2, 4, 8 ", 1).split()) in page, "run `python -m tests.docs.pages`"


def test_a_site_that_ours_misses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gathers = tuple(pattern for pattern in PATTERNS if "all_gather" in str(pattern.target))
    monkeypatch.setattr(custom_pass, "PATTERNS", gathers)
    graphs = compile_sites.sites_of("MLP, dim 0, no bias", 2)
    assert [graph.missed for graph in graphs] == [{"reduce_scatter_tensor"}, {"reduce_scatter_tensor_1"}]
    found = compile_sites.row("MLP, dim 0, no bias", 2, graphs)
    shown = compile_sites.table([found])
    assert "MISSED: what torch's pass fuses" in shown
    assert "MLP, dim 0, no bias, 2 ranks: reduce_scatter_tensor, reduce_scatter_tensor_1" in shown
