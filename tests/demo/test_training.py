"""If two models are trained side by side and their losses disagree, the first step that disagrees is named."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from types import SimpleNamespace

import pytest
from torch import Tensor

from symm_overlap.demo import collectives
from symm_overlap.demo.forms import explicit
from symm_overlap.demo.progress import Curve
from symm_overlap.demo.rank import Rank as DemoRank
from symm_overlap.demo.training import _conclude, _headline, train_as
from tests.demo.models import CONFIG
from tests.ranks import Pool, Rank


class OffFromStep3(collectives.Plain):
    """Plain collectives whose results are wrong from the third step on."""

    calls = 0

    def matmul_reduce_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        self.calls += 1
        per_step = 2 * CONFIG.model.layers
        return super().matmul_reduce_scatter(x, weight) * (1.5 if self.calls > 2 * per_step else 1.0)


def compare_with_a_wrong_one(me: Rank) -> tuple[int, str]:
    here = DemoRank(me.rank, me.world, me.device, me.group)
    config = dataclasses.replace(CONFIG, steps=4, compare=True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = train_as(config, here, [explicit(kind(me.group)) for kind in (collectives.Plain, OffFromStep3)])
    return code, out.getvalue()


def test_compare_names_the_first_step_that_disagrees_and_exits_with_1(ranks: Pool) -> None:
    code, shown = ranks.run(2, compare_with_a_wrong_one)[0]
    assert code == 1
    assert "LOSSES DISAGREE from step 3 on" in shown


def test_names_of_files_are_shown_in_any_encoding_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reads the byte e9 of a name that is not UTF-8 as the character \\udce9."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    config = dataclasses.replace(CONFIG, text="\udce9.txt", timeline="é.json", sample=0)
    print(_headline(config, SimpleNamespace(parameter_count=1, stages=1), 9))
    assert _conclude(config, [Curve("plain", [1.0], [1.0])], "", None) == 0
    shown = out.buffer.getvalue().decode()
    assert "\\udce9.txt (9 bytes)" in shown
    assert "\\xe9.json" in shown
