"""`explain` describes the calls that the ops accept, and refuses all others."""

from __future__ import annotations

import re

import pytest
import torch

from symm_overlap.collective.explain import explain
from symm_overlap.collective.problem import OPS
from tests.collective.test_fake_group import fake_group
from tests.collective.test_paths import LARGE, large
from tests.ranks import Pool, Rank


@pytest.mark.parametrize(
    "change", [{"world": 0}, {"m": -1}, {"n": -1}, {"k": -1}, {"device": "tpu"}], ids=lambda change: next(iter(change))
)
def test_explain_refuses_what_cannot_be(change: dict[str, object]) -> None:
    (name, value) = next(iter(change.items()))
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        large(**change)
    with pytest.raises(ValueError, match=r"'gather'.*allowed are all_gather, all_gather_matmul"):
        explain("gather", **LARGE)
    with pytest.raises(ValueError, match="matmul_reduce_scatter has a matmul: give k too"):
        explain("matmul_reduce_scatter", m=64, n=64, world=2)
    with pytest.raises(TypeError, match=r"dtype is torch\.int8"):
        large(dtype=torch.int8)
    for dtype in ("float32", None):
        with pytest.raises(TypeError, match=f"dtype is {dtype}"):
            explain("all_gather", m=64, n=64, dtype=dtype, world=2)


@pytest.mark.parametrize(
    ("op", "last_dim", "wrong", "right"),
    [
        ("all_gather_matmul", False, "m", "nk"),
        ("all_gather_matmul", True, "k", "mn"),
        ("all_gather", False, "m", "n"),
        ("all_gather", True, "n", "m"),
        ("matmul_reduce_scatter", False, "m", "nk"),
        ("matmul_reduce_scatter", True, "n", "mk"),
        ("reduce_scatter", True, "n", "m"),
        ("matmul_all_reduce", False, "", "mnk"),
    ],
)
def test_explain_refuses_sizes_that_ranks_cannot_share(op: str, last_dim: bool, wrong: str, right: str) -> None:
    even = {"m": 64, "n": 64, "k": 64 if OPS[op].multiplies else 0}
    for name in right:
        explain(op, **{**even, name: 63}, world=4, last_dim=last_dim)
    for name in wrong:
        with pytest.raises(ValueError, match=f"explain: {name} is 63, which 4 ranks cannot share evenly"):
            explain(op, **{**even, name: 63}, world=4, last_dim=last_dim)


def test_explain_says_why_a_shorter_prediction_is_not_taken() -> None:
    reasons = [explain("matmul_reduce_scatter", m=m, n=4096, k=4096, world=2).reason for m in range(512, 8192, 512)]
    for reason in reasons:
        best, other = (float(each) for each in re.findall(r"(\d+\.\d+) ms", reason)[:2])
        assert other >= best or "saves less than 5% or less than 0.02 ms" in reason or "host" in reason, reason
    assert any("saves less than" in reason for reason in reasons)


def test_explain_says_why_its_choice_is_not_the_quickest_of_its_table() -> None:
    found = explain("all_gather_matmul", m=8192, n=3584, k=8192, world=8, device="cuda")
    assert "pipelined, 1 chunk saves less than 1% and takes the host longer" in found.reason
    times = {each.candidate.name: each.total for each in found.predictions}
    assert times["pipelined, 1 chunk"] < times["pipelined, span 2"] < 1.01 * times["pipelined, 1 chunk"]


def devices(me: Rank) -> list[bool]:
    sizes = {"m": 64, "n": 64, "k": 64, "group": me.group}
    told = [str(explain("all_gather_matmul", **sizes, device=device)) for device in (None, "cpu", "cuda")]
    return [told[0] == told[1], told[0] == told[2]]


def test_explain_takes_the_device_of_the_group(ranks: Pool) -> None:
    """Gloo can also send from GPUs, but here is none."""
    assert ranks.run(2, devices) == [[True, False]] * 2
    with fake_group(2) as group:
        sizes = {"m": 64, "n": 64, "k": 64, "group": group}
        assert str(explain("all_gather_matmul", **sizes)) == str(explain("all_gather_matmul", **sizes, device="cuda"))
