"""What the methods of a stage return, keep and reject."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline.runtime.stage import Stage


class Block(nn.Module):
    """Relays its second argument, changes its first one in place, and uses a layer and a parameter twice each."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.randn(4))
        self.double()

    def forward(self, x: Tensor, skipped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.relu_(x)
        hidden = self.last(self.norm(self.shared(self.shared(hidden)).tanh())) + self.scale.exp()
        return hidden, skipped, hidden * skipped * self.scale


def arguments(microbatch: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(microbatch)
    first, second = (torch.randn(3, 4, dtype=torch.double, generator=random) for _ in range(2))
    return first.requires_grad_(), second.requires_grad_()


def reference(module: nn.Module, microbatches: int, gradients: list[Tensor]) -> list[Tensor | None]:
    """Run the plain backward pass. Return the gradients of all arguments, then of the parameters, which are cleared."""
    found: list[Tensor | None] = []
    for microbatch in range(microbatches):
        x, skipped = arguments(microbatch)
        torch.autograd.backward(module(x * 1, skipped), gradients)
        found += [x.grad, skipped.grad]
    found += [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    return found


@pytest.mark.parametrize("order", ["B0 B1", "I0 W0 I1 W1", "I0 I1 W0 W1", "I1 I0 W0 W1", "B1 I0 W0"])
def test_gradients_equal_the_plain_backward(order: str) -> None:
    torch.manual_seed(0)
    module = Block()
    gradients = [torch.randn(3, 4, dtype=torch.double) for _ in range(3)]
    expected = reference(module, 2, gradients)
    stage, found = Stage(module, 0), {}
    for microbatch in range(2):
        stage.forward(microbatch, arguments(microbatch), {})
    for kind, microbatch in order.split():
        if kind == "B":
            found[microbatch] = stage.backward(int(microbatch), gradients)
        elif kind == "I":
            found[microbatch] = stage.backward_input(int(microbatch), gradients)
        else:
            stage.backward_weight(int(microbatch))
    got = [*found["0"], *found["1"], *(parameter.grad for parameter in module.parameters())]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


class Pair(nn.Module):
    """A module with two outputs. The second one needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return self.linear(x) * scale, x.detach()


def test_what_the_module_returns_is_returned_and_keywords_are_passed_on() -> None:
    module, stage = Pair(), Stage(Pair(), 0)
    stage.module.load_state_dict(module.state_dict())
    x, _ = arguments(0)
    torch.testing.assert_close(stage.forward(0, (x,), {"scale": 2.0}), module(x, 2.0), rtol=0, atol=0)


def test_without_keeping_nothing_is_remembered_and_there_is_no_graph() -> None:
    stage = Stage(Pair(), 0)
    out, _ = stage.forward(0, (arguments(0)[0],), {}, keep=False)
    assert not out.requires_grad
    with pytest.raises(RuntimeError, match="no backward pass to run for microbatch 0: no forward pass was run"):
        stage.backward(0, [None, None])


def test_the_backward_pass_starts_from_the_loss_where_there_is_one() -> None:
    module, (x, _) = Pair(), arguments(0)
    stage = Stage(module, 0)
    out, _ = stage.forward(0, (x,), {})
    stage.replace_outputs(0, [out.square().sum()])
    (found,) = stage.backward(0, [torch.tensor(0.5, dtype=torch.double)])
    (0.5 * module(x)[0].square().sum()).backward()
    torch.testing.assert_close(found, x.grad, rtol=1e-12, atol=1e-12)


def test_the_caller_s_tensors_get_no_gradient() -> None:
    """The graph of the caller's tensors belongs to another stage. Their gradient is only returned."""
    source = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    stage = Stage(Pair(), 0)
    out, _ = stage.forward(0, (source * 2,), {})
    (found,) = stage.backward(0, [torch.ones_like(out), None])
    assert found is not None
    assert source.grad is None


def test_calls_out_of_order_are_refused() -> None:
    stage = Stage(Pair(), 3)
    x, _ = arguments(0)
    out, _ = stage.forward(0, (x,), {})
    with pytest.raises(RuntimeError, match="stage 3 ran the forward pass of microbatch 0 already"):
        stage.forward(0, (x,), {})
    with pytest.raises(ValueError, match="stage 3 has 2 outputs and got 1 gradients"):
        stage.backward(0, [torch.ones_like(out)])
    with pytest.raises(RuntimeError, match="the weight part of microbatch 0: its input part comes first"):
        stage.backward_weight(0)
    stage.backward_input(0, [torch.ones_like(out), None])
    for again in (stage.backward, stage.backward_input):
        with pytest.raises(RuntimeError, match="for microbatch 0: it was run already"):
            again(0, [torch.ones_like(out), None])
    stage.backward_weight(0)
    with pytest.raises(RuntimeError, match="its input part comes first"):
        stage.backward_weight(0)


def test_a_step_that_failed_can_be_forgotten() -> None:
    stage = Stage(Pair(), 0)
    stage.forward(0, (arguments(0)[0],), {})
    stage.clear()
    stage.forward(0, (arguments(0)[0],), {})
