"""A backward pass in two parts calls hooks once, and keeps between the parts only what the weight part needs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline.runtime.stage import Stage
from tests.pipeline.runtime.modules import MLP, WIDTH, Of, linear, matrix


def microbatch(module: nn.Module, *inputs: Tensor) -> tuple[Stage, Any]:
    """Return a stage that has run one forward pass, and the result of that pass."""
    stage = Stage(module, 1)
    return stage, stage.forward(0, inputs, {})


def rows() -> Tensor:
    return torch.randn(5, WIDTH, dtype=torch.double, requires_grad=True)


def test_hooks_on_parameters_are_called_once_on_the_whole_gradient() -> None:
    """This also holds for a parameter that is used twice, and for hooks that run after accumulation."""
    module = Of(lambda m, w, v, x: m(m(x).tanh()) @ w @ v.t(), linear(), matrix(), matrix()).double()
    seen: list[tuple[str, Tensor]] = []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.append((name, grad.clone())))
        after = f"{name} after"
        parameter.register_post_accumulate_grad_hook(lambda p, after=after: seen.append((after, p.grad.clone())))
    stage, out = microbatch(module, rows())
    stage.backward_input(0, [torch.ones_like(out)])
    stage.backward_weight(0)
    for name, parameter in module.named_parameters():
        for key in (name, f"{name} after"):
            (found,) = (grad for other, grad in seen if other == key)
            torch.testing.assert_close(found, parameter.grad, rtol=0, atol=0)


def test_the_result_of_a_hook_on_a_value_counts_once() -> None:
    """The gradients that the hook adds up, and those that `retain_grad` keeps, also count once."""
    kept: list[Tensor] = []
    total = torch.zeros(5, WIDTH, dtype=torch.double)

    def add(grad: Tensor) -> Tensor:
        total.add_(grad)
        return 3 * grad

    def forward(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        hidden = first(x)
        hidden.register_hook(add)
        hidden.retain_grad()
        kept.append(hidden)
        return second(hidden)

    module, x = Of(forward, linear(), linear()).double(), rows()
    module(x).sum().backward()
    wanted = [x.grad, kept.pop().grad, total.clone(), *(parameter.grad for parameter in module.parameters())]
    module.zero_grad()
    total.zero_()
    stage, out = microbatch(module, x)
    (found,) = stage.backward_input(0, [torch.ones_like(out)])
    stage.backward_weight(0)
    got = [found, kept.pop().grad, total, *(parameter.grad for parameter in module.parameters())]
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_gradients_go_to_the_parameters_that_the_forward_pass_used() -> None:
    """This holds even if the module has other parameters by then, as with FSDP."""
    module = linear().double()
    used = list(module.parameters())
    stage, out = microbatch(module, rows())
    module.weight, module.bias = (nn.Parameter(torch.zeros_like(parameter)) for parameter in used)
    stage.backward_input(0, [torch.ones_like(out)])
    stage.backward_weight(0)
    assert all(parameter.grad is not None for parameter in used)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_node_that_cannot_leave_out_gradients_runs_once() -> None:
    """oneDNN's LSTM always computes all of its gradients, so all of them are computed in the input part."""
    lstm = nn.LSTM(WIDTH, WIDTH)
    stage, out = microbatch(Of(lambda inner, x: inner(x)[0], lstm), torch.randn(3, 2, WIDTH, requires_grad=True))
    if not out.grad_fn.name().startswith("MkldnnRnnLayerBackward"):
        pytest.skip("this torch has no such LSTM")
    stage.backward_input(0, [torch.ones_like(out)])
    before = [parameter.grad.clone() for parameter in lstm.parameters()]
    stage.backward_weight(0)
    torch.testing.assert_close([parameter.grad for parameter in lstm.parameters()], before, rtol=0, atol=0)


class Saves(torch.autograd.Function):
    """The identity, which saves a tensor of its own. The test keeps only a weak reference to that tensor."""

    references: list[Any] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        own = x.new_ones(7)
        Saves.references.append(weakref.ref(own))
        ctx.save_for_backward(own)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0][0]


def test_the_input_part_frees_what_the_weight_part_does_not_need() -> None:
    Saves.references = []
    module = Of(lambda a, b, x: b(Saves.apply(a(Saves.apply(x)))), linear(), linear()).double()
    stage, out = microbatch(module, rows())
    output, gradient = weakref.ref(out), torch.ones_like(out)
    del out
    assert all(reference() is not None for reference in Saves.references)
    of_argument = weakref.ref(stage.backward_input(0, [gradient])[0])
    assert output() is None
    assert of_argument() is None, "only the caller may keep the gradient of the argument"
    assert all(reference() is None for reference in Saves.references)
    given = weakref.ref(gradient)
    del gradient
    assert given() is not None, "the weight part needs this gradient"
    stage.backward_weight(0)
    assert given() is None


@pytest.mark.parametrize("steps", ["B", "IW"])
def test_nothing_is_left_for_the_garbage_collector(steps: str) -> None:
    """If a graph were in a reference cycle, its activations would stay in memory until Python collects cycles."""
    Saves.references = []
    module = Of(lambda m, x: Saves.apply(m(Saves.apply(x))), MLP()).double()
    gc.collect()
    gc.disable()
    try:
        stage, out = microbatch(module, rows())
        node, gradient = weakref.ref(out.grad_fn), torch.ones_like(out)
        del out
        for step in steps:
            if step == "W":
                stage.backward_weight(0)
            else:
                (stage.backward if step == "B" else stage.backward_input)(0, [gradient])
        assert node() is None
        assert all(reference() is None for reference in Saves.references)
    finally:
        gc.enable()


def test_a_value_kept_from_the_forward_pass_cannot_be_differentiated_after_it() -> None:
    kept = []

    def forward(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        kept.append(first(x).sin())
        return second(kept[0])

    stage, out = microbatch(Of(forward, linear(), linear()).double(), rows())
    stage.backward_input(0, [torch.ones_like(out)])
    with pytest.raises(RuntimeError, match="its saved tensors are freed"):
        kept[0].sum().backward()
