"""The cost model: each number equals one that is computed by hand, and the numbers decide which path is chosen."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from symm_overlap.blocks import force_path
from symm_overlap.collective.choosing import plans, prediction
from symm_overlap.collective.choosing.candidates import CHUNKS, SPANS, Candidate
from symm_overlap.collective.choosing.chooser import choose
from symm_overlap.collective.choosing.prediction import StepCosts, predict_plan
from symm_overlap.collective.choosing.quickest import REQUIRED_RATIO, REQUIRED_SAVING_MS
from symm_overlap.collective.exchange.planned import gather, reduction
from symm_overlap.collective.explain import explain
from symm_overlap.collective.planners import produce_reduce_scatter
from symm_overlap.collective.planners.published import torch_all_gather_matmul
from symm_overlap.collective.problem import OPS, Problem, problem
from symm_overlap.plan import Step
from symm_overlap.runtime import TRAITS, Device, DeviceCosts, costs_of
from symm_overlap.settings import Settings

from .test_matmul_costs import PLAIN

TWO = {"compute": ("compute0", "compute1"), "copy": "copy"}


def of(op: str = "all_gather_matmul", m: int = 400, n: int = 50, k: int = 20, world: int = 4, **how: bool) -> Problem:
    return problem(op, m, n, k, torch.float32, world, "cuda", **how)


# --- a step


def test_every_step_has_its_cost() -> None:
    described = of()  # parts of 100 rows: 8000 bytes
    costs = StepCosts(described, PLAIN, chunks=2)
    plan = plans.planned(described, choose(described, Settings(path="pipelined", chunks=2), direct=True))
    found = {step.kind: sum(costs(0, step)) / 1e3 - bool(step.after) * PLAIN.event for step in plan.steps}
    # Half a part loses as much time at its end as a whole part does, as a share of itself twice as much.
    rows = PLAIN.matmul(50, 50, 20, torch.float32, held=1, share=0.5 / (0.5 - 1 + 1 / PLAIN.pieces))
    assert found == pytest.approx(
        {
            "fork": 0.0,
            "publish": 2 * 4000 / 1e6 + 0.5,
            "signal": 0.125,
            "wait": 0.1875,
            "pull": 0.25 + 4000 / 1e5,
            "consume": sum(rows),
            "join": 0.0,
        }
    )
    # Streams without kernels turn between waits and copies.
    turning = StepCosts(described, replace(PLAIN, turn=0.75), 2, plan)
    assert {step.kind for step in plan.steps if sum(turning(0, step)) > sum(costs(0, step))} == {"wait", "pull"}
    pull = next(step for step in plan.steps if step.kind == "pull")
    assert sum(turning(0, pull)) == pytest.approx(sum(costs(0, pull)) + 750)
    assert sum(costs(0, Step("barrier", "s"))) / 1e3 == pytest.approx(0.125 + 0.0625)
    reducing = produce_reduce_scatter(0, 4, **TWO)
    step = next(step for step in reducing.steps if step.kind == "reduce")
    took = sum(StepCosts(of("matmul_reduce_scatter"), PLAIN, 1)(0, step)) / 1e3
    assert step.after
    assert took == pytest.approx(5 * 20000 / 1e6 + 0.5 + PLAIN.event)


@pytest.mark.parametrize(
    ("op", "last_dim", "part"),
    [
        ("all_gather_matmul", False, (100, 50, 20)),
        ("all_gather_matmul", True, (400, 50, 5)),
        ("matmul_reduce_scatter", False, (100, 50, 20)),
        ("matmul_reduce_scatter", True, (400, 13, 20)),
        ("all_gather_weight_matmul", False, (prediction.ACTIVATIONS, 100, 50)),
        ("weight_grad_reduce_scatter", True, (400, 13, prediction.ACTIVATIONS)),
    ],
)
def test_the_matmul_of_one_part(op: str, last_dim: bool, part: tuple[int, int, int]) -> None:
    assert prediction._part(of(op, last_dim=last_dim)) == part


# --- a call


def sequential(op: str, device: DeviceCosts = PLAIN, carried: dict[str, Any] | None = None, **how: bool) -> float:
    """Return the prediction for a sequential call. ``carried`` overrides fields of its choice."""
    described = of(op, **how)
    candidate = choose(described, Settings(path="sequential"), direct=True)
    return prediction.predict(described, device, replace(candidate, **(carried or {}))).total


def test_a_sequential_call_is_a_chain() -> None:
    matmul, issued = sum(PLAIN.matmul(400, 50, 20, torch.float32)), PLAIN.host
    gathered, summed = 3 * 8000 / 1e5 + 2.0, 3 * 20000 / 1e5 + 2.0
    addition = 5 * 20000 / 1e6 + 0.5
    assert sequential("all_gather_matmul") == pytest.approx(1e3 * (issued + gathered + matmul))
    by_library = {"exchange": "c10d", "one_shot": False}
    assert sequential("matmul_reduce_scatter", carried=by_library) == pytest.approx(
        1e3 * (issued + matmul + summed + addition)
    )
    assert sequential("matmul_all_reduce", carried=by_library) == pytest.approx(
        1e3 * (issued + matmul + 2 * summed + addition)
    )
    # With a kernel of this library: it starts, sees a flag, and reads the peers' data.
    started = PLAIN.kernel + PLAIN.flag
    read = started + 3 * 20000 / 1e5
    assert sequential("matmul_reduce_scatter") == pytest.approx(1e3 * (issued + matmul + read))
    assert sequential("matmul_all_reduce", carried={"one_shot": False}) == pytest.approx(
        1e3 * (issued + matmul + 2 * read)
    )
    whole = started + 3 * 80000 / 1e5
    assert sequential("matmul_all_reduce", carried={"one_shot": True}) == pytest.approx(1e3 * (issued + matmul + whole))
    published = 2 * 80000 / 1e6 + 0.5
    assert sequential("reduce_scatter") == pytest.approx(1e3 * (issued + published + read))
    assert sequential("all_gather") == pytest.approx(1e3 * (issued + 3 * 20000 / 1e5 + 2.0))
    in_order = 2 * 4 * 8000 / 1e6 + 0.5
    assert sequential("all_gather_matmul", last_dim=True) == pytest.approx(
        1e3 * (issued + gathered + in_order + matmul)
    )


def test_a_pipelined_call_hides_the_shorter_of_copies_and_matmuls() -> None:
    described = problem("all_gather_matmul", 8192, 8192, 8192, torch.bfloat16, 8, "cuda")
    fast = costs_of(TRAITS["cuda"].costs, Device("H100"))
    candidate = choose(described, Settings(path="pipelined", chunks=1), direct=True)
    free = replace(fast, copy_start=0.0, kernel=0.0, signal=0.0, flag=0.0, event=0.0, host=0.0, held=0)
    for slow in (1.0, 1e2):
        found = prediction.predict(described, replace(free, copy=free.copy / slow), candidate)
        # Matmuls may take a little less in total, because one stream's matmuls fill the tails of the other's.
        assert max(0.95 * found.matmul, found.moves) <= found.total < max(found.matmul, found.moves) * 1.2
    busy = prediction.predict(described, replace(free, host=1e-3, host_matmul=1e-3), candidate)
    steps = plans.planned(described, candidate).steps
    followed = [before for step in steps for before in step.after]
    assert busy.total >= busy.host == pytest.approx(len(steps) + len(set(followed)) + len(followed))  # each event once


def test_torchs_plan_is_predicted_by_the_same_costs() -> None:
    described = of()
    found = predict_plan(described, PLAIN, torch_all_gather_matmul(0, 4), Candidate("torch"))
    crossed = 1e3 * PLAIN.event  # the last barrier, and the first matmul on the other stream, wait for another stream
    assert found.meets == pytest.approx(3 * 187.5 + crossed)
    assert found.matmul == pytest.approx(4e3 * sum(PLAIN.matmul(100, 50, 20, torch.float32, held=1)))


def test_copies_slow_down_a_matmul_only_if_memory_cannot_serve_both() -> None:
    """Of four chunks of 8000 bytes three are copied: they are read here by peers, and as many come from peers."""
    described = of()
    for memory in (1e6, 1e3):
        slow = replace(PLAIN, memory=memory, matmul_memory=memory)
        read = 4 * (100 * 20 + 20 * 50 + 100 * 50)
        for chunks, moved in ((1, 2 * 8000 * 3 / 4), (2, 2 * 4000 * 3 / 4)):
            least = (read - (4 * 50 * 70 if chunks == 2 else 0) + moved) / memory
            plan = plans.planned(described, choose(described, Settings(path="pipelined", chunks=chunks), direct=True))
            step = next(step for step in plan.steps if step.kind == "consume")
            body, _ = StepCosts(described, slow, chunks)(0, step)
            assert (body / 1e3 == pytest.approx(least)) is (memory == 1e3), (memory, chunks, body, least)


# --- the choice


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_the_least_prediction_is_chosen(op: str, world: int) -> None:
    chosen = set()
    for rows in (0, 1, 64, 1024, 8192, 1 << 17):
        m = rows if OPS[op].replicates or OPS[op].moves_weight else -(-rows // world) * world
        choice = explain(op, m=m, n=4096, k=4096, world=world)
        plain, *others = choice.predictions
        assert (plain.path, choice.model) == ("sequential", "H100")
        assert {each.path for each in others} == {"pipelined", "fused"} if OPS[op].fused and m else {"pipelined"}
        for path in ("pipelined", "fused"):
            chunks = [each.candidate.chunks for each in others if each.path == path and each.candidate.span == 1]
            assert chunks == list(CHUNKS[: len(chunks)]) or m <= world * 4
        spans = [each.candidate.span for each in others if each.candidate.span > 1]
        most = list(dict.fromkeys(min(span, world - 1) for span in SPANS)) if world > 2 and OPS[op].fused and m else []
        assert spans == most[: len(spans)]
        assert bool(spans) == (len(most) > 0 and m > 1)
        times = {each.candidate: max(each.total / REQUIRED_RATIO, each.total + REQUIRED_SAVING_MS) for each in others}
        times = {plain.candidate: plain.total, **{key: time for key, time in times.items() if key.path == "pipelined"}}
        near = [each for each in others if times.get(each.candidate, 1e9) <= 1.01 * min(times.values())]
        expected = plain if plain.total == min(times.values()) else min(near, key=lambda each: each.host)
        assert choice.candidate == expected.candidate
        assert f"predicted {expected.total:.3f} ms" in choice.reason
        chosen.add(choice.path)
    # With few ranks, a plan for one small all-reduce takes less time than the two collectives of the library.
    assert "sequential" in chosen or (world < 8 and OPS[op].replicates)


def test_a_forced_path_or_number_of_chunks_leaves_the_rest_to_the_model() -> None:
    sizes = {"m": 8192, "n": 8192, "k": 3584, "world": 8}
    best = explain("matmul_reduce_scatter", **sizes)
    with force_path("pipelined"):
        forced = explain("matmul_reduce_scatter", **sizes)
    assert (forced.candidate, forced.reason) == (best.candidate, "forced")
    assert "sequential" not in {each.path for each in forced.predictions}
    with force_path("fused"):
        fused = explain("matmul_reduce_scatter", **sizes)
    assert {each.path for each in fused.predictions} == {fused.path} == {"fused"}
    assert fused.chunks == min(fused.predictions, key=lambda each: each.total).candidate.chunks
    with force_path(None, chunks=3):
        free = explain("matmul_reduce_scatter", **sizes)
    assert [each.candidate for each in free.predictions if each.path == "pipelined"] == [("pipelined", 3, 1)]
    with force_path(None, span=3):
        spanning = explain("matmul_reduce_scatter", **sizes)
    assert [each.candidate for each in spanning.predictions if each.path == "pipelined"] == [("pipelined", 1, 3)]
    with force_path("pipelined", chunks=3):
        assert explain("matmul_reduce_scatter", **sizes).predictions == ()


def test_a_device_is_known_by_its_name_and_the_first_one_stands_for_others() -> None:
    """The device name selects the costs. Unknown devices have the costs of the first record."""
    known = TRAITS["cuda"].costs
    assert costs_of(known, Device("NVIDIA H200")).name == "H200"
    assert costs_of(known, Device("NVIDIA A100-SXM4-80GB")).name == "A100"
    assert costs_of(known, Device("NVIDIA L4", stream_waits=False)) is known[0]
    assert costs_of(known, Device("NVIDIA L4")) is costs_of(known, Device()) is costs_of(known, Device("H100"))


# --- the plan


def test_the_plan_that_is_timed_is_the_one_that_runs() -> None:
    """The prediction uses the same plan object as the real call."""
    for op in ("all_gather_matmul", "all_gather_weight_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        described = of(op, m=4096)
        choice = choose(described, Settings(path="pipelined"), direct=True)
        call = SimpleNamespace(
            problem=described,
            choice=choice,
            rank=0,
            world=4,
            symmetric=False,
            backend=SimpleNamespace(traits=TRAITS["cuda"]),
            route=SimpleNamespace(plans={}),
        )
        if described.op_kind.gathers:
            ran = gather.Gather.plan_of(None, call, keep=False, consume=True, accumulate=False)
        else:
            planner = reduction.produce_all_reduce if "all_reduce" in op else reduction.produce_reduce_scatter
            ran = reduction._plan(planner, call)
        assert plans.planned(described, choice, rank=0) is ran
