"""On a GPU too, a call and its steps are ranges in a profiler's trace, and activities belong to the steps."""

from __future__ import annotations

import json
import os
from pathlib import Path as Folder

import pytest
import torch

import symm_overlap
from symm_overlap.profile import Recording, kinds_of_calls, read, record
from symm_overlap.profile.torch_trace import from_torch_trace
from tests.gpu.conditions import Path, on_path
from tests.gpu.conftest import Worlds
from tests.ranks import Rank

pytestmark = pytest.mark.gpu

PATHS: list[Path] = [("sequential", None, None), ("pipelined", 2, 2), ("fused", 2, None)]
ON_A_GPU = pytest.mark.skipif(
    "SYMM_OVERLAP_HOST_GPU" in os.environ, reason="the GPU that is made of threads has no activities to record"
)


def calls(me: Rank, path: Path) -> None:
    x, weight = torch.ones(128, 64, device=me.device), torch.ones(64, 32, device=me.device)
    tall = torch.ones(128 * me.world, 64, device=me.device)
    with on_path(path):
        symm_overlap.all_gather_matmul(x, [weight], 0, me.group, return_A=False)
        symm_overlap.matmul_reduce_scatter(tall, weight, "sum", 0, me.group)


def ranges_of_steps(me: Rank, path: Path, folder: Folder) -> list[list[str]]:
    """Return for each call the kinds of its steps, in the order in which the host issued them."""
    calls(me, path)
    file = folder / f"{me.rank}.json"
    with record(file):
        calls(me, path)
    trace = json.loads(file.read_text())
    # Without activities of a GPU, calls on a CPU are read from their ranges alone.
    ranges = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    for event in ranges:
        event["name"] = event["name"].replace(" device=cuda ", " device=cpu ")
    (recording,) = from_torch_trace({"traceEvents": ranges}, "")
    return [
        [each.step.kind for each in activities if each.step is not None] for activities in recording.activities_of_calls
    ]


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_steps_that_are_issued_without_python_are_ranges(gpu_ranks: Worlds, path: Path, tmp_path: Folder) -> None:
    if path[0] == "fused":
        pytest.importorskip("triton")
    for gather, scatter in gpu_ranks.run(2, ranges_of_steps, path, tmp_path, waits="memory"):
        multiplies = {"fused": 1, "sequential": 1}.get(path[0], 4)  # steps; the fused kernel is launched by one
        own = "tiles" if path[0] == "fused" else "consume"
        if path[0] != "sequential":  # which is the library's collective
            assert gather.count(own) == multiplies
            assert {"signal", "wait", "pull"} <= set(gather)
        assert scatter.count("tiles" if path[0] == "fused" else "produce") == multiplies
        assert scatter.count("reduce") == {"fused": 2, "sequential": 1}.get(path[0], 2)


def recorded(me: Rank, path: Path) -> Recording:
    calls(me, path)
    with record() as found:
        calls(me, path)
    (recording,) = found.recordings
    return recording


@ON_A_GPU
@pytest.mark.parametrize("path", PATHS[1:], ids=str)
def test_activities_belong_to_the_steps_that_launched_them(gpu_ranks: Worlds, path: Path) -> None:
    if path[0] == "fused":
        pytest.importorskip("triton")
    for rank, recording in enumerate(gpu_ranks.run(2, recorded, path, waits="kernels")):
        assert recording.rank == rank
        assert torch.cuda.get_device_name() == recording.device
        assert len(recording.calls) == 2
        for activities in recording.activities_of_calls:
            roles = {each.role for each in activities}
            assert {"compute", "copy"} <= roles
            assert all(each.step is not None for each in activities if each.role in ("compute", "copy", "sum"))
            computing = [each for each in activities if each.role == "compute"]
            assert len({each.step for each in computing}) == (1 if path[0] == "fused" else 4)
        assert sum(each.role == "sum" for each in recording.activities_of_calls[1]) == 2
        for kind in kinds_of_calls(recording):
            assert 0 < kind.median.compute <= kind.median.total
            assert kind.median.host > 0


@ON_A_GPU
def test_a_trace_of_a_program_without_our_ops_is_read(tmp_path: Folder) -> None:
    path = tmp_path / "trace.json"
    x = torch.ones(256, 256, device="cuda")
    with record(path) as found:
        for _ in range(3):
            x = x @ x
    (recording,) = read(path)
    assert [each.role for each in recording.activities].count("compute") >= 3
    assert recording.activities == found.recordings[0].activities
