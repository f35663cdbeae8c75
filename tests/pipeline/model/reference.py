"""Compare a pipelined model with the whole model on the same microbatches."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from symm_overlap.pipeline.model import PipelineModel
from tests.pipeline.model.models import Batch, inputs_of, loss_of, make, microbatches
from tests.ranks import Rank

EXACT = {"rtol": 1e-10, "atol": 1e-13}  # microbatches and stages are summed in another order


def whole_step(model: nn.Module, batch: Batch, options: dict[str, Any], count: int) -> Tensor:
    """Return the mean of the microbatches' losses, and add its gradients to the parameters.

    Models of Hugging Face compute their loss in float32. From there on, the gradient is computed in float64.
    """
    losses = []
    for each in microbatches(batch, count):
        losses.append(loss_of(model(**inputs_of(each, options)), each, options))
        (losses[-1] / count).backward()
    return torch.stack(losses).mean().detach()


def same_gradients(pipe: PipelineModel, whole: nn.Module) -> None:
    expected = dict(whole.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        assert (parameter.grad is None) == (expected[name].grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name].grad, **EXACT, msg=lambda m, n=name: f"{n}: {m}")


def trains_like_the_whole(
    me: Rank, name: str, layers: int, schedule: str, count: int, more: dict[str, Any]
) -> list[str]:
    """Train two steps without zeroing gradients, evaluate, train one more, clip, and return the state dict's names."""
    model, batch, options = make(name, layers)
    whole = copy.deepcopy(model)
    options |= more
    pipe = PipelineModel(model, num_microbatches=count, schedule=schedule, group=me.group, **options)
    for _ in range(2):
        loss, expected = pipe.run_train(**batch), whole_step(whole, batch, options, count)
        last = me.rank == pipe.schedule.rank_of(pipe.schedule.stages - 1)
        assert (loss is not None) == last
        if loss is not None:
            torch.testing.assert_close(loss, expected, **EXACT)
        same_gradients(pipe, whole)
    check_eval(pipe, whole, batch, options, count)
    pipe.run_train(**batch)
    whole_step(whole, batch, options, count)
    same_gradients(pipe, whole)
    norm = pipe.clip_grad_norm_(0.01)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.01), rtol=1e-6, atol=0.0)
    same_gradients(pipe, whole)
    return list(pipe.state_dict())


def check_eval(pipe: PipelineModel, whole: nn.Module, batch: Batch, options: dict[str, Any], count: int) -> None:
    """Forwards alone must return what the whole model returns for the whole batch, and must not change gradients."""
    before = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    found = pipe.run_eval(**inputs_of(batch, options))
    assert all(parameter.grad is before[name] for name, parameter in pipe.named_parameters())
    if found is None:
        return
    with torch.no_grad():
        each = [whole(**inputs_of(microbatch, options)) for microbatch in microbatches(batch, count)]
    assert type(found) is type(each[0])
    if isinstance(found, Tensor):
        torch.testing.assert_close(found, torch.cat(each), **EXACT)
        return
    assert found.keys() == each[0].keys()
    for key, value in found.items():
        parts = [result[key] for result in each]
        if not isinstance(value, Tensor):
            assert value == parts[0]
        elif parts[0].dim():
            torch.testing.assert_close(value, torch.cat(parts), **EXACT)
        else:
            torch.testing.assert_close(value, torch.stack(parts).mean(), **EXACT)
