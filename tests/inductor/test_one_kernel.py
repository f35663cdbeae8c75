"""The report shows the path `fused` only for calls that are one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass
from symm_overlap.inductor.report import clear, recorded
from symm_overlap.settings import Settings

from ..collective.test_fake_group import fake_group
from .tracing import inputs_of, traced

c10d = torch.ops._c10d_functional
New = Callable[..., Tensor]


def scattered(product: Tensor, group: str) -> Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(product, "sum", 2, group))  # type: ignore[no-any-return]


def reduced(product: Tensor, group: str) -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(product, "sum", group))  # type: ignore[no-any-return]


def gathered(shard: Tensor, group: str) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(shard, 2, group))  # type: ignore[no-any-return]


def kept(product: Tensor, group: str) -> list[Tensor]:
    return [scattered(product, group), product]


PROGRAMS: list[tuple[str, Callable[[int, str, New], Any]]] = [
    ("fused", lambda _, group, new: scattered(new(8, 4) @ new(4, 6), group)),
    ("pipelined", lambda _, group, new: scattered(new(8, 4) @ new(4, 6) + new(8, 4) @ new(4, 6), group)),
    ("pipelined", lambda _, group, new: scattered(new(8, 4) @ new(4, 6) + new(8, 6), group)),
    ("fused", lambda _, group, new: scattered(torch.addmm(new(6), new(8, 4), new(4, 6)), group)),
    ("pipelined", lambda _, group, new: scattered(torch.addmm(new(8, 1), new(8, 4), new(4, 6)), group)),
    ("pipelined", lambda _, group, new: kept(new(8, 4) @ new(4, 6), group)),
    ("fused", lambda _, group, new: reduced(new(8, 4) @ new(4, 6), group)),
    ("pipelined", lambda _, group, new: reduced(new(8, 4) @ new(4, 6) + new(8, 4) @ new(4, 6), group)),
    ("fused", lambda _, group, new: gathered(new(4, 4), group) @ new(4, 6)),
    ("fused", lambda _, group, new: torch.addmm(new(6), gathered(new(4, 4), group), new(4, 6))),
    ("pipelined", lambda _, group, new: gathered(new(4, 4), group).t() @ new(8, 6)),
]


@pytest.mark.parametrize(("path", "program"), PROGRAMS, ids=range(len(PROGRAMS)))
def test_what_is_summed_kept_or_a_gradient_is_pipelined(path: str, program: Callable[[int, str, New], Any]) -> None:
    """Sums, kept products and gradients of weights have no single kernel, so their path is `pipelined`."""
    with fake_group(2) as group:
        graph = traced(program, 2, group, inputs_of(program, 2, group, torch.float32))
        clear()
        OverlapPass(Choices(strict=True, settings=Settings(path="fused")))(graph.graph)
        (report,) = recorded().graphs
        assert [site.path for site in report.sites] == [path]
