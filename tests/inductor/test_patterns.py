"""What is fused and what is not, on graphs of groups that nobody is behind."""

from __future__ import annotations

import pytest
import torch

from tests.collective.test_fake_group import fake_group
from tests.inductor.cases import CASES
from tests.inductor.tracing import inputs_of, overlapped, traced

FUSED = [name for name, case in CASES.items() if case.matmuls]
SKIPPED = [name for name, case in CASES.items() if case.reason]


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("name", FUSED)
def test_collectives_beside_matmuls_are_fused(name: str, world: int) -> None:
    case = CASES[name]
    with fake_group(world) as group:
        graph = traced(case.program, world, group, inputs_of(case.program, world, group, torch.float32))
        changed, report = overlapped(graph, strict=True)
    assert sorted(site.matmuls for site in report.sites) == sorted(case.matmuls), str(report)
    targets = [str(node.target) for node in changed.graph.nodes]
    assert not [target for target in targets if "_c10d_functional" in target]
    assert sum("symm_overlap.fused" in target for target in targets) == len(case.matmuls)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("name", SKIPPED)
def test_what_cannot_be_fused_stays_as_it_is_and_the_report_says_why(name: str, world: int) -> None:
    case = CASES[name]
    with fake_group(world) as group:
        graph = traced(case.program, world, group, inputs_of(case.program, world, group, torch.float32))
        changed, report = overlapped(graph)
    (site,) = report.sites
    assert case.reason in site.reason
    assert site.candidate == case.candidate
    assert changed.code == graph.code
