"""The ops that the pass puts in work if the ranks cannot share the features of a layer evenly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import symm_overlap
from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass
from tests.inductor.test_models import step
from tests.inductor.tracing import compiled_up_to_the_pass
from tests.ranks import Pool, Rank

WIDTH, HIDDEN = 6, 11  # the ranks share 11 features as 6 + 5, or as 4 + 4 + 3


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def as_in_eager_mode(me: Rank, scattered: bool) -> list[int]:
    torch._dynamo.reset()
    symm_overlap.inductor.clear()
    torch.manual_seed(0)
    rows: Placement = Shard(0) if scattered else Replicate()
    plan = {
        "up": ColwiseParallel(input_layouts=rows, use_local_output=False),
        "down": RowwiseParallel(output_layouts=rows),
    }
    model = parallelize_module(MLP().double(), DeviceMesh.from_group(me.group, "cpu"), plan)
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    expected = step(model, model, x)
    compiled = compiled_up_to_the_pass(model, OverlapPass(Choices(strict=True)))
    for _ in range(2):
        for one, other in zip(step(compiled, model, x), expected, strict=True):
            torch.testing.assert_close(one, other)
    return [graph.fused for graph in symm_overlap.inductor.report().graphs]


@pytest.mark.parametrize(("world", "scattered", "fused"), [(2, True, [2, 2]), (3, True, [2, 2]), (2, False, [1, 1])])
def test_features_that_the_ranks_cannot_share_evenly(
    ranks: Pool, world: int, scattered: bool, fused: list[int]
) -> None:
    assert ranks.run(world, as_in_eager_mode, scattered, timeout=240) == [fused] * world
