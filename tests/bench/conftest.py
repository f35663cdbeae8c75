"""Start the ranks of benchmarks in the same way as tests/ranks.py: forked from a server that has imported torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.harness import launch
from symm_overlap.cli import fork_server
from tests.ranks import forks


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks, so that they need not import torch, which takes seconds for each of them."""
    forks()
    start_processes = launch.start_processes

    def forked(function: Callable[..., Any], arguments: tuple[Any, ...], *, start_method: str, **options: Any) -> Any:
        assert start_method == "spawn"
        with fork_server.process_context() as here:
            return start_processes(run, (here, function, *arguments), start_method="forkserver", **options)

    monkeypatch.setattr(launch, "start_processes", forked)


def run(rank: int, here: fork_server.ProcessContext, function: Callable[..., Any], *arguments: Any) -> None:
    """Run one rank. Its output is captured in the same way as the output of pytest."""
    fork_server.adopt_context(here)
    function(rank, *arguments)
