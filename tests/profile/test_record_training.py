"""Recordings of training: FSDP2's collectives, and the actions of a pipeline's step."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from symm_overlap.fsdp import apply
from symm_overlap.pipeline.runtime import PipelineRuntime, Stage
from symm_overlap.profile import kinds_of_calls, record
from symm_overlap.profile.report import describe
from tests.ranks import Pool, Rank


def train_with_fsdp(me: Rank) -> dict[str, tuple[int, float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    mesh = DeviceMesh.from_group(me.group, "cpu")
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    apply(model)
    x = torch.randn(8, 64)
    model(x).sum().backward()
    with record() as recorded:
        model(x).sum().backward()
    (recording,) = recorded.recordings
    moved = {"FSDP all-gather": "copies", "FSDP reduce-scatter": "sums"}
    found = [(kind.call.text, kind) for kind in kinds_of_calls(recording)]
    return {text: (kind.count, getattr(kind.median, moved[text.partition(",")[0]])) for text, kind in found}


def test_the_collectives_of_fsdp_are_calls(ranks: Pool) -> None:
    for found in ranks.run(2, train_with_fsdp):
        nbytes = (64 * 64 + 64) * 4
        assert found[f"FSDP all-gather, output of {nbytes} bytes"][0] >= 2
        assert found[f"FSDP reduce-scatter, output of {nbytes // 2} bytes"][0] == 2
        assert all(moved > 0 for _, moved in found.values())


def train_a_pipeline(me: Rank) -> tuple[list[tuple[str, int]], set[str]]:
    torch.manual_seed(0)
    runtime = PipelineRuntime(
        Stage(nn.Linear(32, 32), me.rank), "1F1B", microbatches=4, loss=nn.functional.mse_loss, group=me.group
    )
    x, target = torch.randn(16, 32), torch.randn(16, 32)
    for _ in range(2):
        runtime.step(x, target=target)
    with record() as recorded:
        runtime.step(x, target=target)
    (recording,) = recorded.recordings
    kinds = {each.step.kind for each in recording.activities if each.step is not None and len(each.calls) == 1}
    return [(describe(kind), kind.count) for kind in kinds_of_calls(recording)], kinds


def test_a_step_of_a_pipeline_is_a_call_whose_steps_are_its_actions(ranks: Pool) -> None:
    for rank, (described, kinds) in enumerate(ranks.run(2, train_a_pipeline)):
        assert [count for text, count in described if text.startswith("pipeline step of ")] == [1]
        assert {"F", "B"} <= kinds
        assert ("SEND_F" if rank == 0 else "RECV_F") in kinds
