"""The sharded model has the weights, losses and gradients of the unsharded model, for any number of ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.distributed.tensor import DTensor

from symm_overlap.demo.model import rotary_tables, rotate
from tests.demo.models import CONFIG, KINDS, alone, sharded, windows
from tests.quick import one_in
from tests.ranks import Pool, Rank

# The dimension of each weight that is split over the ranks. Every rank has all other weights as a whole.
SPLIT = {"query": 1, "key": 1, "value": 1, "gate": 1, "up": 1, "output": 0, "down": 0}


def losses_of_training(me: Rank, kind: str, steps: int, dtype: str) -> list[float]:
    config = dataclasses.replace(CONFIG, dtype=dtype)
    trainer, batches = sharded(me, kind, config), windows(config)
    return [trainer.step(batches.next()) for _ in range(steps)]


def first_gradients(me: Rank, kind: str) -> dict[str, torch.Tensor]:
    trainer = sharded(me, kind)
    trainer.gradients(windows().next())
    return dict(gradient(name, p.grad) for name, p in trainer.model.named_parameters() if p.grad is not None)


def gradient(name: str, grad: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Return the name of a parameter in the unsharded model and this rank's part of its gradient, (in, out)."""
    if isinstance(grad, DTensor):  # the weight of an nn.Linear is (out, in)
        return name.removesuffix(".weight"), grad.to_local().t()
    return name, grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_sharded_training_has_the_losses_of_one_process(ranks: Pool, world: int, kind: str) -> None:
    trainer, batches = alone(), windows()
    expected = [trainer.step(batches.next()) for _ in range(8)]
    assert expected[-1] < expected[0] - 0.3, "the reference does not learn, so equal losses would say little"
    for losses in ranks.run(world, losses_of_training, kind, 8, "float32"):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", one_in(2, [2, 4]))
def test_every_gradient_is_that_of_one_process(ranks: Pool, world: int, kind: str) -> None:
    # Losses alone would not show a wrong gradient: Adam hides it if a gradient is off by a factor.
    trainer = alone()
    trainer.gradients(windows().next())
    by_rank = ranks.run(world, first_gradients, kind)
    for name, parameter in trainer.model.named_parameters():
        dim = SPLIT.get(name.rsplit(".", 1)[-1])
        for rank, found in enumerate(by_rank):
            expected = parameter.grad if dim is None else parameter.grad.chunk(world, dim)[rank]
            error = (found[name] - expected).norm() / expected.norm()
            assert error < 1e-5, f"{name} on rank {rank}: relative error {error:.1e}"


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_training_stays_near_float32(ranks: Pool, kind: str) -> None:
    trainer, batches = alone(), windows()
    expected = [trainer.step(batches.next()) for _ in range(8)]
    for losses in ranks.run(2, losses_of_training, kind, 8, "bfloat16"):
        assert losses == pytest.approx(expected, rel=2e-2)
        assert losses != expected


def test_attention_sees_no_later_byte() -> None:
    model, window = alone().model, windows().next()[:-1]
    changed = window.clone()
    changed[20:] += 1
    before, after = model(window), model(changed)
    assert torch.equal(before[:20], after[:20])
    assert not torch.equal(before[20], after[20])


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    cos, sin = rotary_tables(16, 8)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 1, 8, generator=generator).expand(16, 1, 1, 8) for _ in range(2))
    turned_query, turned_key = rotate(query, cos, sin).flatten(1), rotate(key, cos, sin).flatten(1)
    torch.testing.assert_close(turned_query.norm(dim=1), query.flatten(1).norm(dim=1))
    scores = turned_query @ turned_key.T  # query position by key position
    for distance in range(-15, 16):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)
    assert scores[0].std() > 0.1
