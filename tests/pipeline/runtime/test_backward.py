"""A backward pass in two parts has the gradients of the whole backward pass, and does no more work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from symm_overlap.pipeline.runtime.stage import Stage
from tests.nn.blocks import WIDTH
from tests.pipeline.runtime.modules import CASES


class Pass:
    """One forward and backward pass of a module, and its results.

    Attributes:
        gradients: the gradients of the inputs, then of the parameters.
        flops: the FLOPs of each step of the backward pass.
    """

    def __init__(self, module: nn.Module, inputs: list[Tensor], steps: str, gradients: tuple[int, ...] | None) -> None:
        module.zero_grad()
        torch.manual_seed(1)
        plain = steps == "plain"
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        stage = Stage(module, 1)
        returned = module(*(x * 1 for x in leaves)) if plain else stage.forward(0, tuple(leaves), {})
        outputs = [returned] if isinstance(returned, Tensor) else list(returned)
        given: list[Tensor | None] = [
            torch.randn_like(out) if out.requires_grad and (gradients is None or index in gradients) else None
            for index, out in enumerate(outputs)
        ]
        self.flops: list[int] = []
        for step in ["plain"] if plain else steps:
            with FlopCounterMode(display=False) as counter:
                if step == "plain":
                    self.run_plain(outputs, given)
                    found = [x.grad for x in leaves]
                elif step == "W":
                    stage.backward_weight(0)
                else:
                    found = list((stage.backward if step == "B" else stage.backward_input)(0, given))
            self.flops.append(counter.get_total_flops())
        self.gradients = [*found, *(parameter.grad for parameter in module.parameters())]
        self.left = len(stage._kept)

    @staticmethod
    def run_plain(outputs: list[Tensor], given: list[Tensor | None]) -> None:
        pairs = [(out, grad) for out, grad in zip(outputs, given, strict=True) if grad is not None]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_both_parts_give_the_gradients_of_the_whole_for_its_work(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    module = case.make().double()
    inputs = [torch.randn(4, 3, WIDTH, dtype=torch.double).requires_grad_(needs) for needs in case.inputs]
    plain, whole, parts = (Pass(module, inputs, steps, case.gradients) for steps in ("plain", "B", "IW"))
    for found in (whole, parts):
        torch.testing.assert_close(found.gradients, plain.gradients, rtol=1e-12, atol=1e-12)
        assert sum(found.flops) == sum(plain.flops)
        assert not found.left
    if case.share is not None:
        assert parts.flops[1] == pytest.approx(case.share * sum(plain.flops))
