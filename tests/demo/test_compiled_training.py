"""The compiled model has the losses of eager mode if both train side by side, as in ``train --compile --compare``.

The model is compiled up to the pass only. tests/inductor/test_compile.py tests that Inductor's code for such models
computes the same.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from symm_overlap.demo.config import TrainConfig
from symm_overlap.demo.forms import forms_of
from symm_overlap.demo.rank import Rank as DemoRank
from symm_overlap.demo.training import train_as
from symm_overlap.inductor._torch import PASS_OPTION
from tests.inductor.tracing import compiled_up_to_the_pass
from tests.ranks import Pool, Rank

ROOT = Path(__file__).parents[2]


def train_and_compare(me: Rank) -> tuple[int, str]:
    here = DemoRank(me.rank, me.world, me.device, me.group)
    config = TrainConfig(size="tiny", seq=32, batch=2, steps=4, sample=0, compile=True, compare=True)
    torch_compile, out = torch.compile, io.StringIO()

    def compiled(model: Callable[..., Any], options: dict[str, Any] | None = None, **others: Any) -> Any:
        if options is None:
            return torch_compile(model, **others)
        return compiled_up_to_the_pass(model, options[PASS_OPTION])

    torch._dynamo.reset()
    with contextlib.redirect_stdout(out), mock.patch("torch.compile", compiled):
        code = train_as(config, here, forms_of(config, here))
    return code, out.getvalue()


@pytest.mark.slow
def test_every_collective_is_fused_and_the_losses_are_those_of_eager_mode(ranks: Pool) -> None:
    (code, printed), (other_code, other_printed) = ranks.run(2, train_and_compare, timeout=240)
    assert (code, other_code, other_printed) == (0, 0, ""), "both ranks must succeed, and only rank 0 may print"
    rows = re.findall(r"^ +(\d) +(\d\S+) +(\d\S+)", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    assert all(abs(float(row[1]) / float(row[2]) - 1) < 1e-5 for row in rows)
    assert float(rows[-1][1]) < float(rows[0][1])
    # Two layers have a forward and a backward each, and each of these has two gathers and two scatters.
    report = printed[printed.index("the pass fused 16 of 16") : printed.index("losses agree")]
    assert report.count("  2 x linears.py:") == 8
    assert f"```\n{report}```" in (ROOT / "docs/compile.md").read_text(), report
    assert "losses agree at every step" in printed
