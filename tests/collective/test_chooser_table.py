"""The chooser's answers equal the stored ones, which have been reviewed."""

from __future__ import annotations

import difflib

import torch

from symm_overlap.collective.choosing.chooser import choose
from symm_overlap.collective.problem import problem
from symm_overlap.settings import Settings
from tests.collective.chooser_table import FILE, text


def test_the_chooser_answers_as_it_did() -> None:
    changes = difflib.unified_diff(FILE.read_text().splitlines(), text().splitlines(), "kept", "now", lineterm="", n=0)
    assert not list(changes), "if the change is intended: python -m tests.collective.chooser_table"


def test_a_group_without_peers_takes_every_path_on_every_lane() -> None:
    described = problem("all_reduce", 64, 4096, 0, torch.bfloat16, 8, "cuda")
    for path in ("c10d", "sequential", "pipelined"):
        for lane in (0, 1):
            choice = choose(described, Settings(path=path, lane=lane), direct=True, fake=True)
            assert (choice.path, choice.exchange, choice.one_shot) == (path, "fake", False)
