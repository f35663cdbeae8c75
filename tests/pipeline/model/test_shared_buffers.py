"""A buffer that several layers have under different names, or in parts, must not be changed in several stages."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from symm_overlap.pipeline.model import PipelineModel, TraceError
from symm_overlap.pipeline.model.cut import cut
from tests.pipeline.model.in_one_process import traced
from tests.pipeline.model.models import WIDTH, mean_square, reals
from tests.ranks import Pool, Rank, RankError


class Counting(nn.Module):
    """A layer that adds to a buffer, which may be a part of a larger one, or only reads it."""

    def __init__(self, sums: Tensor, adds: bool) -> None:
        super().__init__()
        self.linear, self.adds = nn.Linear(WIDTH, WIDTH), adds
        self.register_buffer("sums", sums)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + self.sums
        if self.adds:
            self.sums.add_(x.detach().mean(0))
        return x


class Together(nn.Module):
    """Layers with one norm, with one buffer, or with parts of a buffer, which the model may use as a whole."""

    def __init__(self, what: str) -> None:
        super().__init__()
        norm, sums = nn.BatchNorm1d(WIDTH), torch.zeros(2, WIDTH)
        if what == "norm":
            layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), norm) for _ in range(2)]
        else:
            parts = sums if what.startswith("parts") else sums[:1].expand(2, -1)
            layers = [Counting(parts[index], what != "constant") for index in range(2)]
        self.layers = nn.ModuleList(layers)
        self.what = what
        self.register_buffer("all", sums)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.all.sum(0) if self.what == "parts of a whole" else x


SHARED = {
    "norm": r"layers\.0\.1\.num_batches_tracked, which shares memory with layers\.1\.1\.num_",
    "one": r"layers\.0\.sums, which shares memory with layers\.1\.sums",
    "parts of a whole": r"layers\.0\.sums, which shares memory with all",
}


@pytest.mark.parametrize("what", [*SHARED, "constant", "parts"])
def test_one_that_is_traced(what: str) -> None:
    found, _, _ = traced(Together(what), {"x": reals(4, WIDTH).float()})
    cut(found, (2,))
    if what in SHARED:
        with pytest.raises(TraceError, match=rf"changes the buffer {SHARED[what]}.*several stages use it"):
            cut(found, (1, 1))
    else:
        cut(found, (1, 1))


def without_tracing(me: Rank, what: str) -> None:
    model, x = Together(what), reals(4, WIDTH).float()
    pipe = PipelineModel(model, num_microbatches=2, loss=mean_square, partition="even", trace=False, group=me.group)
    pipe.run_train(x=x, target=x)


@pytest.mark.parametrize("what", ["norm", "one", "constant", "parts"])
def test_one_without_tracing(ranks: Pool, what: str) -> None:
    """Nothing is known about the model then, so the first write is the error."""
    if what in SHARED:
        with pytest.raises(
            RankError, match=r"changes the buffer layers\.\d\.[\w.]+, which another stage has too"
        ) as error:
            ranks.run(2, without_tracing, what)
        assert re.search("stage 0 changes", str(error.value))
    else:
        ranks.run(2, without_tracing, what)


class Scaled(nn.Module):
    """A layer that multiplies by a buffer."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.register_buffer("scale", table)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class OneTable(nn.Module):
    """A model whose layers have its own buffer under their own names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(WIDTH, dtype=torch.float64))
        self.layers = nn.ModuleList(Scaled(self.table) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def keys(me: Rank, trace: bool) -> set[str]:
    pipe = PipelineModel(OneTable(), num_microbatches=2, group=me.group, layer_names="layers.*", trace=trace)
    return set(pipe.build(x=reals(4, WIDTH)).state_dict())


@pytest.mark.parametrize("trace", [True, False])
def test_state_dicts_have_all_names_of_a_buffer(ranks: Pool, trace: bool) -> None:
    assert set().union(*ranks.run(2, keys, trace)) == set(OneTable().state_dict())
