"""Ranks of benchmarks that start as those of tests/ranks.py do: forked from a server that has imported torch."""

from __future__ import annotations

from typing import Any

import pytest

from bench.harness import launch
from tests.ranks import forks


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks need not import torch, which takes each of them seconds.

    Not for tests that capture what ranks print: it goes to where the server's output goes.
    """
    forks()
    start_processes = launch.start_processes

    def forked(*arguments: Any, start_method: str, **options: Any) -> Any:
        assert start_method == "spawn"
        return start_processes(*arguments, start_method="forkserver", **options)

    monkeypatch.setattr(launch, "start_processes", forked)
