"""When matmuls span the parts of several peers: what the chooser predicts, what autotune measures, and settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import symm_overlap
from symm_overlap.collective.choosing.candidates import Candidate, ladders
from symm_overlap.collective.choosing.chooser import choose
from symm_overlap.collective.choosing.plans import planned
from symm_overlap.collective.choosing.prediction import StepCosts, on_sms, predict
from symm_overlap.collective.choosing.quickest import REQUIRED_RATIO
from symm_overlap.collective.choosing.tuned import Tuned
from symm_overlap.collective.dispatch.note import make_note, settings_in
from symm_overlap.collective.exchange.ranges import called, name_of_range
from symm_overlap.collective.problem import problem
from symm_overlap.plan import simulate
from symm_overlap.runtime import TRAITS, Device, costs_of
from symm_overlap.settings import Settings


@pytest.mark.parametrize("call", ["last dimension", "two products", "odd size", "weights", "no matmul"])
def test_other_calls_have_no_spans(call: str) -> None:
    how: dict[str, Any] = {
        "last dimension": {"last_dim": True},
        "two products": {"one_matmul": False},
        "odd size": {},
        "weights": {},
        "no matmul": {},
    }[call]
    op = {"weights": "weight_grad_reduce_scatter", "no matmul": "reduce_scatter"}.get(call, "matmul_reduce_scatter")
    n = 4095 if call == "odd size" else 4096
    described = problem(op, 8192 - 8 * (call == "odd size"), n, 1024, torch.bfloat16, 8, "cuda", **how)
    assert not described.spannable
    found = choose(described, Settings(path="pipelined", span=4), direct=True)
    assert found == choose(described, Settings(path="pipelined"), direct=True), "the number of chunks is chosen freely"
    assert (found.path, found.span) == ("pipelined", 1)
    assert all(each.candidate.span == 1 for each in choose(described, Settings(), direct=True).predictions)


def test_a_span_is_never_longer_than_there_are_peers() -> None:
    for world, asked, span in ((2, 8, 1), (3, 8, 2), (8, 8, 7), (8, 5, 4), (8, 4, 4), (8, 1, 1)):
        described = problem("all_gather_matmul", 4096 * world, 4096, 4096, torch.bfloat16, world, "cuda")
        for path in ("pipelined", "fused", "c10d"):
            found = choose(described, Settings(path=path, span=asked), direct=True)
            assert found.candidate == Candidate(path, found.chunks, span if path == "pipelined" else 1)


def test_a_backward_pass_may_have_chunks_where_its_forward_pass_had_a_span() -> None:
    """The settings of both are merged, and then the chunks count."""
    described = problem("all_gather_matmul", 8192, 13312, 16384, torch.bfloat16, 8, "cuda")
    for path in ("pipelined", None):
        merged = Settings(chunks=2).with_defaults(Settings(path=path, span=4))
        assert choose(described, merged, direct=True).candidate[1:] == ((2, 1) if path else (1, 1))
        assert all(each.candidate.span == 1 for each in choose(described, merged, direct=True).predictions)


def test_a_compiled_graph_keeps_the_span() -> None:
    settings = Settings(path="pipelined", span=3)
    assert settings_in(make_note(settings)) == settings


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_predictions_are_those_of_a_simulation_of_all_ranks(op: str) -> None:
    """Ranks cut their matmuls at different places, so they are not equally quick, and the slowest one counts."""
    known = replace(costs_of(TRAITS["cuda"].costs, Device("H100")), host=0.0, host_matmul=0.0)
    for sizes in ((8192, 8192, 8192), (8192, 2304, 16384), (2048, 7680, 15616)):
        described = problem(op, *sizes, torch.bfloat16, 8, "cuda")
        for span in (2, 3, 4, 8):
            choice = choose(described, Settings(path="pipelined", span=span), direct=True)
            plans = [planned(described, choice, rank) for rank in range(8)]
            costs = [StepCosts(described, known, 1, plan) for plan in plans]
            together = simulate(
                [plans], lambda rank, step, costs=costs: costs[rank](rank, step), on_sms=on_sms(plans[0])
            )
            found = predict(described, known, choice).total
            assert 0.95 < found / together.makespan < 1.03, (sizes, span, found, together.makespan)


def test_a_call_that_cannot_have_a_span_does_not_take_one_that_was_measured() -> None:
    """Calls with and without an addend count as calls of one kind."""
    times = ("sequential", 1, 1, 7.0), ("pipelined", 1, 1, 10.0), ("pipelined", 2, 1, 8.0), ("pipelined", 1, 4, 5.0)
    tuned = Tuned(tuple((Candidate(*candidate), time) for *candidate, time in times))
    for one_matmul, path in ((True, "pipelined"), (False, "sequential")):
        described = problem("matmul_reduce_scatter", 8192, 4096, 1024, torch.bfloat16, 8, "cuda", one_matmul=one_matmul)
        assert choose(described, Settings(), direct=True, tuned=tuned).candidate == (path, 1, 4 if one_matmul else 1)


def test_autotune_considers_spans_where_parts_are_copied() -> None:
    for device, spans in (("cuda", {1, 2, 3, 4, 7}), ("cpu", {1})):
        described = problem("all_gather_matmul", 8192, 4096, 4096, torch.bfloat16, 8, device)
        assert {each.span for ladder in ladders(described, "pipelined") for each in ladder} == spans


def test_what_is_nearly_the_quickest_must_also_be_clearly_quicker_than_plain() -> None:
    """Of these sizes, the candidate with the shortest time on the host is above the limit."""
    described = problem("all_gather_matmul", 2048, 15872, 4608, torch.bfloat16, 8, "cuda")
    choice = choose(described, Settings(), direct=True)
    times = {each.candidate: each.total for each in choice.predictions}
    plain = times[Candidate("sequential")]
    least = min(time for candidate, time in times.items() if candidate.path == "pipelined")
    near = {candidate for candidate, time in times.items() if candidate.path == "pipelined" and time <= 1.01 * least}
    assert any(times[candidate] > REQUIRED_RATIO * plain for candidate in near)
    assert times[choice.candidate] <= REQUIRED_RATIO * plain


def test_large_matmuls_are_predicted_to_gain() -> None:
    """The copies of 7 shards take an eighth of the time of the matmul, so all arrive during the first one."""
    large = problem("all_gather_matmul", 8192, 13312, 16384, torch.bfloat16, 8, "cuda")
    choice = choose(large, Settings(), direct=True)
    times = {each.candidate: each.total for each in choice.predictions}
    assert choice.candidate == Candidate("pipelined", 1, 7)
    assert times[choice.candidate] < 0.9 * times[Candidate("pipelined", 1, 1)]
    small = problem("all_gather_matmul", 8192, 768, 4096, torch.bfloat16, 8, "cuda")
    assert choose(small, Settings(), direct=True).span == 1, "these shards take longer to copy than to multiply"


def test_the_range_of_a_call_says_the_span() -> None:
    described = problem("matmul_reduce_scatter", 8192, 12288, 6144, torch.bfloat16, 8, "cuda")
    choice = choose(described, Settings(path="pipelined", span=3), direct=True)
    _, found = called(name_of_range(described, choice, rank=5)) or pytest.fail("the range is not read")
    assert (found.candidate, "span 3" in str(choice)) == (choice.candidate, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"span": 0}, "span is 0"), ({"span": 2, "chunks": 2}, "only one of them"), ({"span": -3}, "span is -3")],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said), symm_overlap.force_path("pipelined", **arguments):
        pass
