"""The cost model of the path ``fused``, and of waits that occupy no multiprocessor (SM)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from bench.harness.stand_in import standing_in
from bench.harness.triton_gpu import NativeFlags
from symm_overlap import _C
from symm_overlap.collective.choosing import plans, prediction
from symm_overlap.collective.choosing.candidates import Candidate
from symm_overlap.collective.choosing.chooser import choose
from symm_overlap.collective.choosing.prediction import StepCosts, predict_plan
from symm_overlap.collective.exchange.fused.run import FusedRun
from symm_overlap.collective.planners import issued
from symm_overlap.collective.problem import problem
from symm_overlap.kernels import load
from symm_overlap.plan import Program, Table
from symm_overlap.runtime import TRAITS, Device, GroupState, costs_of
from symm_overlap.runtime.cpu.backend import CpuBackend
from symm_overlap.runtime.stand_in import StandInWorkspace
from symm_overlap.settings import Settings
from tests.runtime.test_launches import OPS

from .test_matmul_costs import PLAIN
from .test_prediction import of


def test_every_step_of_a_fused_plan_has_its_cost() -> None:
    # Each part of 100 rows is computed in 2 pieces of 5 x 5 tiles, and 8 of these pieces run one after another. The
    # kernel leaves one SM free and has half of the library's rate, so a tile takes 4 s.
    whole, group = -(-8 * 25 // 9) * 4, 25 / 9 * 4
    raised, polled, event = 0.125, 0.125 + 0.0625, PLAIN.event
    for op, kinds in (
        ("all_gather_matmul", {"pull": 0.25 + 4000 / 1e5, "raise": raised}),
        ("matmul_reduce_scatter", {"push": 0.25 + 10000 / 1e5, "poll": polled, "reduce": 5 * 10000 / 1e6 + 0.5}),
    ):
        described = of(op)
        plan = plans.planned(described, choose(described, Settings(path="fused", chunks=2), direct=True))
        tiles = [step for step in plan.steps if step.kind == "tiles"]
        costs = StepCosts(described, PLAIN, 2, plan)
        body = group * 1e3
        assert [costs(0, step) for step in tiles[:-1]] == [pytest.approx((body, 0.0))] * 7
        assert costs(0, tiles[-1]) == pytest.approx((body, (whole - 8 * group + 0.5) * 1e3))
        for step in (step for step in plan.steps if step.kind in kinds):
            follows = step.after and step.kind != "poll"
            assert sum(costs(0, step)) / 1e3 == pytest.approx(kinds[step.kind] + bool(follows) * event), step
        found = predict_plan(described, PLAIN, plan, Candidate("fused", 2))
        assert found.matmul == pytest.approx((whole + 0.5) * 1e3)
        assert found.host / 1e3 / PLAIN.host == pytest.approx(sum(issued(plan)))


class Noted:
    """A lane of a GPU on which nothing runs. ``operations`` lists the operations that the host has issued to it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.operations: list[str] = []
        patch.setattr(CpuBackend, "machine", lambda backend, device: (90, 132))
        patch.setattr(torch.cuda, "current_stream", mock.Mock())
        zeros = torch.zeros
        patch.setattr(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))
        for kind in ("copy", "sum"):
            patch.setattr(CpuBackend, kind, self.noting(kind))
        patch.setattr(StandInWorkspace, "steps", lambda _: {kind: self.noting(kind) for kind in ("signal", "wait")})
        patch.setattr(_C, "CudaFlags", NativeFlags, raising=False)
        for name in ("up", "wait"):
            patch.setattr(NativeFlags, name, self.noting(name))
        patch.setattr(FusedRun, "scriptable", False)
        for name in ("all_gather_matmul", "matmul_reduce_scatter"):
            patch.setattr(load(name, 90), name, self.noting("tiles"))

    def noting(self, what: str) -> Callable[..., None]:
        return lambda *arguments, **options: self.operations.append(what)

    def run(self, program: Program, table: Table) -> None:
        """Issue operations in the same way as `CudaStreams.run`."""
        for item in program.items:
            self.operations += ["follow"] * len(item.waits)
            if item.kind in table:  # the fork and the join are not in it
                table[item.kind](item.step)
            self.operations += ["record"] * (item.event is not None)


@pytest.mark.parametrize("path", ["pipelined", "fused"])
@pytest.mark.parametrize(("world", "chunks"), [(2, 1), (4, 2)])
def test_as_many_operations_are_predicted_as_the_host_issues(
    path: str, world: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        described = problem(op, 64 * world, 16, 32, torch.float32, world, "cuda")
        candidate = choose(described, Settings(path=path, chunks=chunks), direct=True)
        candidate = replace(candidate, copies=prediction.copy_streams(described, None))  # the stand-in knows no costs
        plan = plans.planned(described, candidate)
        with standing_in(0, world, path=path, chunks=chunks) as me, monkeypatch.context() as patch:
            noted = Noted(patch)
            me.lane.streams = noted
            OPS[op](me, world)
            launched = [*noted.operations, *me.taken()]
        # One more is predicted: the event at the end of the call, which only a lane on a GPU records.
        assert sum(issued(plan)) == len(launched) + 1, launched


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_a_fused_call_hides_the_shorter_of_copies_and_tiles(op: str) -> None:
    described = problem(op, 8192, 8192, 8192, torch.bfloat16, 8, "cuda")
    fast = costs_of(TRAITS["cuda"].costs, Device("H100"))
    candidate = choose(described, Settings(path="fused", chunks=1), direct=True)
    small = ("copy_start", "kernel", "matmul_start", "signal", "wait", "flag", "event", "turn", "host")
    free = replace(fast, fused=1.0, **dict.fromkeys(small, 0.0))
    whole = sum(free.matmul(8192, 8192, 8192, torch.bfloat16, held=1))
    for slow in (1.0, 1e2):
        found = prediction.predict(described, replace(free, copy=free.copy / slow), candidate)
        assert found.matmul == pytest.approx(1e3 * whole)
        shorter, longer = sorted((found.matmul, found.moves))
        assert longer <= found.total * 1.0001
        assert found.total < longer + shorter / 4
    half = prediction.predict(described, replace(free, fused=0.5), candidate)
    assert half.matmul == pytest.approx(2e3 * whole)


def test_small_kernels_do_not_wait_for_matmuls() -> None:
    """Matmuls, sums and copies within a GPU take turns. A signal or barrier starts beside a matmul."""
    described = of("matmul_reduce_scatter")
    for path, computes in (("fused", {"tiles", "reduce"}), ("pipelined", {"produce", "reduce"})):
        plan = plans.planned(described, choose(described, Settings(path=path, chunks=1), direct=True))
        assert prediction.on_sms(plan) & {*plan.kinds, "barrier"} == computes
    assert "publish" in prediction.on_sms(plan)


@pytest.mark.parametrize("path", ["pipelined", "fused"])
def test_waits_by_memory_operations_hold_no_sm_and_take_their_own_time(path: str) -> None:
    """Waits by memory operations of a stream occupy no SM and have a different cost from waits by kernels."""
    fast = costs_of(TRAITS["cuda"].costs, Device("NVIDIA H100"))
    slow = costs_of(TRAITS["cuda"].costs, Device("NVIDIA H100", stream_waits=False))
    assert (fast.held, fast.wait, slow.held, slow.wait) == (0, slow.stream_wait, 1, 2e-6)
    assert fast is costs_of(TRAITS["cuda"].costs, Device())
    described = problem("all_gather_matmul", 8 * 11 * 128, 12 * 256, 4096, torch.bfloat16, 8, "cuda")
    kernels, memory = (
        choose(described, Settings(path=path), direct=True, device=Device("H100", waits)) for waits in (False, True)
    )
    assert (kernels.model, memory.model) == ("H100, kernels wait", "H100")
    one, other = kernels.predictions[0], memory.predictions[0]
    assert one.meets - other.meets == pytest.approx(1e3 * (slow.wait - fast.wait) * 7)
    # 11 x 12 tiles fill 132 SMs. With one SM less, one more wave is needed. A fused kernel always leaves one SM free.
    assert (other.matmul < one.matmul) == (path == "pipelined")
    assert other.total < one.total if path == "pipelined" else other.total <= one.total


def test_the_model_gives_a_call_to_our_kernel_only_where_the_kernel_was_measured() -> None:
    described = problem("all_gather_matmul", 8192, 2304, 16384, torch.bfloat16, 8, "cuda")
    measured = choose(described, Settings(), direct=True, device=Device("NVIDIA H200", stream_waits=True))
    assert measured.path == "fused", str(measured)
    assert not measured.doubt
    assert choose(described, Settings(), direct=True, device=Device("NVIDIA GH200 480GB", stream_waits=True)).doubt
    for sizes, dtype in (((8192, 2304, 16384), torch.float32), ((8192, 2303, 16384), torch.bfloat16)):
        unlike = problem("all_gather_matmul", *sizes, dtype, 8, "cuda")
        found = choose(unlike, Settings(), direct=True, device=Device("NVIDIA H200", stream_waits=True))
        assert found.path != "fused", str(found)
        assert str(found).endswith(found.doubt)
        assert found.doubt.startswith("fused is used only if")
    without = choose(described, Settings(), direct=True, device=Device("NVIDIA H200", kernels=False))
    assert without.path == "pipelined"
    assert "no Triton" in without.doubt
    known = {each.name: each for each in TRAITS["cuda"].costs}
    assert [name for name, each in known.items() if each.fused_measured] == ["H200"]
    unmeasured = replace(known["H200"], fused_measured=False)
    traits = replace(TRAITS["cuda"], costs=(unmeasured,))
    with mock.patch.dict(TRAITS, cuda=traits):
        other = choose(described, Settings(), direct=True, device=Device("an unmeasured H200", stream_waits=True))
    assert other.path == "pipelined", str(other)
    assert other.predictions[0].total == measured.predictions[0].total


def test_a_group_uses_what_all_its_ranks_have() -> None:
    there, no_triton, kernels_wait = Device("a"), Device("a", kernels=False), Device("a", stream_waits=False)
    for found, expected in (
        ((there, there), there),
        ((there, no_triton), no_triton),
        ((kernels_wait, no_triton), Device("a", stream_waits=False, kernels=False)),
    ):
        assert GroupState.device(SimpleNamespace(devices={"cuda": found}), "cuda") == expected  # type: ignore[arg-type]
