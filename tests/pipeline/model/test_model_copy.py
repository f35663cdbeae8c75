"""The copy of a model on which it is traced."""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune

from symm_overlap.pipeline.model import PipelineModel
from tests.pipeline.model.in_one_process import Stages
from tests.pipeline.model.models import WIDTH, mean_square, reals
from tests.pipeline.model.reference import EXACT, same_gradients, whole_step
from tests.ranks import Pool, Rank


def pruned(me: Rank) -> None:
    """torch.nn.utils.prune computes a weight in each forward, and keeps it as a tensor that cannot be deep-copied."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    for layer in layers:
        prune.l1_unstructured(layer, "weight", 0.5)
    model = nn.Sequential(*layers).double()
    whole = copy.deepcopy(model.state_dict())
    pipe = PipelineModel(model, num_microbatches=2, loss=mean_square, group=me.group, layer_names="*")
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).double()
    found = pipe.run_train(input=x, target=x)
    y = x.clone()
    weights = {name: value.requires_grad_(value.is_floating_point()) for name, value in whole.items()}
    for layer in range(4):
        weight = weights[f"{layer}.weight_orig"] * weights[f"{layer}.weight_mask"].detach()
        y = nn.functional.linear(y, weight, weights[f"{layer}.bias"])
    loss = (y - x).square().mean()
    loss.backward()
    if found is not None:
        torch.testing.assert_close(found, loss.detach())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad)


def test_a_pruned_model_is_copied_for_tracing(ranks: Pool) -> None:
    ranks.run(2, pruned)


@dataclasses.dataclass
class Held:
    """Something that a model has stored, in an object."""

    value: Any


class Refusing(nn.Linear):
    def __deepcopy__(self, memo: Any) -> None:
        raise RuntimeError("there is one of me")


class Anew:
    """An object whose state cannot be copied, and is created anew each time."""

    def __getstate__(self) -> Any:
        return {"lock": threading.Lock()}


def holding(value: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double()
    model[1].held = value
    return model


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("how", [Held, lambda value: [Held(value)], lambda value: partial(print, value)])
@pytest.mark.parametrize("what", [threading.Lock, lambda: torch.ones(2, requires_grad=True) * 2, lambda: sys.stdout])
def test_the_copy_for_tracing_shares_what_cannot_be_copied(how: Callable[[Any], Any], what: Callable[[], Any]) -> None:
    model, x = holding(how(what())), reals(2, WIDTH)
    stages = Stages(model, {"input": x}, (1, 2))
    torch.testing.assert_close(stages(), model(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("what", "error"),
    [
        (generator, r"a generator of 1 \(Linear\) cannot be copied, which .*cannot pickle 'generator'.*trace=False"),
        (lambda: Refusing(2, 2), r"1\.held \(Refusing\) cannot be copied, .*there is one of me"),
        (Anew, r"a lock of 1 \(Linear\) cannot be copied"),
    ],
)
def test_an_error_names_what_cannot_be_copied(what: Callable[[], Any], error: str) -> None:
    with pytest.raises(TypeError, match=error):
        Stages(holding(what()), {"input": reals(2, WIDTH)}, (1, 2))


class OfGroup(nn.Linear):
    """A layer that has kept its process group in an object, as those of Megatron do."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(WIDTH, WIDTH)
        self.held = Held(group)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / dist.get_world_size(self.held.value)


def train_with_groups(me: Rank) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(OfGroup(me.group) for _ in range(4))).double()
    alone = nn.Sequential(*(OfGroup(me.group) for _ in range(4))).double()
    alone.load_state_dict(model.state_dict())
    batch = {"input": reals(4, WIDTH), "target": reals(4, WIDTH, seed=1)}
    pipe = PipelineModel(model, num_microbatches=2, loss=mean_square, group=me.group, layer_names="*")
    loss, expected = pipe.run_train(**batch), whole_step(alone, batch, {"loss": mean_square}, 2)
    if loss is not None:
        torch.testing.assert_close(loss, expected, **EXACT)
    same_gradients(pipe, alone)


def test_layers_may_keep_process_groups_in_objects(ranks: Pool) -> None:
    ranks.run(2, train_with_groups)
