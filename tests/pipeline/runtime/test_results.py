"""The last stage may return anything, also values that cannot be compared, or that differ between microbatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.runtime.models import Layer, assert_gradients, batch, gradients, reference, squared
from tests.pipeline.runtime.test_contract import runtime_of
from tests.ranks import Pool, Rank


@dataclass
class Result:
    """A result that pytrees do not know, and whose comparison has no single answer."""

    value: Tensor


class Unlike:
    """A value that refuses every comparison."""

    def __eq__(self, other: object) -> bool:
        raise NotImplementedError

    __hash__ = None  # type: ignore[assignment]


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "a dataclass": Result,
    "an array": lambda out: (out, out.detach().numpy()),
    "an array of one element": lambda out: (out, np.array([out.sum().item()])),
    "what cannot be compared": lambda out: (out, Unlike()),
    "other keys each time": lambda out: {"out": out, f"{out.sum().item()}": 1},
    "a number": lambda out: (out, 3),
}


class Ends(nn.Module):
    """A last stage that returns its result in one of the forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer, self.form = Layer(1), form

    def forward(self, x: Tensor) -> Any:
        return FORMS[self.form](self.layer(x))


def tensor_of(result: Any) -> Tensor:
    value: Tensor = result.value if isinstance(result, Result) else result["out" if isinstance(result, dict) else 0]
    return value


def loss(result: Any, target: Tensor) -> Tensor:
    return squared(tensor_of(result), target)


def ends(me: Rank, form: str) -> None:
    whole, mine = [Layer(0), Layer(1)], [Layer(0), Ends(form)]
    runtime = runtime_of(me, "1F1B", 4, list(mine), loss=loss)
    for step in range(2):
        x, target = batch(4, step)
        expected, _, wanted = reference(whole, x, target, 4)
        result = runtime.step(x, target=target)
        assert_gradients(gradients(mine[0] if me.rank == 0 else mine[1].layer), wanted[me.rank])
        if me.rank == 0:
            assert result is None
            continue
        if isinstance(result, list):
            assert len(result) == 4
            assert tensor_of(result[0]).requires_grad == (form == "a dataclass"), "tensors in pytrees are detached"
            torch.testing.assert_close(torch.cat([tensor_of(each).detach() for each in result]), expected)
            continue
        torch.testing.assert_close(result[0], expected)
        assert not result[0].requires_grad
        assert result[1] == 3 if form == "a number" else len(result[1]) == 4


@pytest.mark.parametrize("form", FORMS)
def test_the_last_stage_may_return(ranks: Pool, form: str) -> None:
    ranks.run(2, ends, form)
