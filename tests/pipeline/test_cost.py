"""The cost simulator agrees with closed forms, with the machine of executor.py, and with times computed by hand."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from symm_overlap.pipeline import Schedule
from symm_overlap.pipeline.generators import GENERATORS, generate
from symm_overlap.pipeline.lowering import lower
from symm_overlap.pipeline.simulation.cost import simulate_cost
from symm_overlap.pipeline.simulation.cost_result import CostResult, _summed
from symm_overlap.pipeline.simulation.costs import PipelineCosts
from symm_overlap.pipeline.simulation.encoded import encode, with_messages
from symm_overlap.pipeline.simulation.work import pipeline_work
from symm_overlap.plan import work
from tests.plan import engine_twin

from . import work_twin
from .executor import run
from .random_schedules import random_compute, with_residency
from .tables import TWO_RANKS, changed, drop, lowered, table

# Times of F, I and W of a whole rank. They are binary fractions, so that sums are exact. None is shorter than W.
COSTS = [(1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (1.5, 1.75, 0.5)]


def of_rank(name: str, ranks: int, microbatches: int, chunks: int, costs: tuple[float, ...]) -> CostResult:
    """Simulate a schedule in which each rank has one part of the model, cut into equal stages."""
    forward, input_grad, weight_grad = (cost / chunks for cost in costs)
    schedule = generate(name, ranks, microbatches, chunks)
    return simulate_cost(schedule, PipelineCosts(forward=forward, input_grad=input_grad, weight_grad=weight_grad))


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bubbles_are_those_of_the_closed_forms(ranks: int, costs: tuple[float, float, float]) -> None:
    forward, input_grad, weight_grad = costs
    backward, many = input_grad + weight_grad, 4 * ranks
    plain = (ranks - 1) * (forward + backward)
    for name in ("GPipe", "1F1B"):
        assert set(of_rank(name, ranks, many, 1, costs).bubbles) == {plain}
    for chunks in (2, 4):
        for name in ("Interleaved1F1B", "LoopedBFS"):
            assert set(of_rank(name, ranks, many, chunks, costs).bubbles) == {plain / chunks}
    less = (ranks - 1) * (forward + backward - 2 * weight_grad)
    assert set(of_rank("ZB-H1", ranks, many, 1, costs).bubbles) == {less}
    if forward == input_grad == weight_grad:
        for name, chunks in (("ZB-H2", 1), ("ZBVZeroBubble", 2)):
            assert max(of_rank(name, ranks, many, chunks, costs).bubbles_in_span) == 0.0
    if forward == input_grad:
        for name, stages in (("DualPipe", ranks), ("DualPipeV", 2 * ranks)):
            pair = forward + backward
            result = simulate_cost(
                generate(name, ranks, 2 * many),
                PipelineCosts(forward=forward, input_grad=input_grad, weight_grad=weight_grad),
            )
            assert max(result.bubbles_in_span) == (stages // 2 - 1) * (pair + backward - 3 * weight_grad)


def test_interleaving_more_loses_once_messages_cost_a_quarter_of_a_forward() -> None:
    def makespan(chunks: int, message: float) -> float:
        costs = PipelineCosts(
            forward=1 / chunks, input_grad=1 / chunks, weight_grad=1 / chunks, message=message, bandwidth=1.0
        )
        return simulate_cost(generate("Interleaved1F1B", 8, 16, chunks), costs).makespan

    assert makespan(4, 0.0) < makespan(2, 0.0)
    assert makespan(4, 0.125) < makespan(2, 0.125)
    assert makespan(4, 0.25) > makespan(2, 0.25)


@pytest.mark.parametrize("name", GENERATORS)
def test_another_machine_finds_the_same_times(name: str) -> None:
    found = 0
    for ranks in (1, 2, 3, 4):
        for microbatches in (1, 4, 8, 16):
            try:
                schedule = generate(name, ranks, microbatches)
            except ValueError:
                continue
            found += 1
            for costs in COSTS:
                expected = run(schedule, *costs)
                result = simulate_cost(
                    schedule, PipelineCosts(**dict(zip(("forward", "input_grad", "weight_grad"), costs, strict=True)))
                )
                assert (result.makespan, result.longest_span) == (expected.makespan, expected.span)
                assert result.bubbles_in_span == tuple(map(expected.bubble, range(ranks)))
    assert found


def test_the_twin_makes_the_same_work_and_finds_the_same_times() -> None:
    for seed in range(60):
        schedule = with_residency(random_compute(seed, compounds=True), seed)
        stages = schedule.stages
        costs = PipelineCosts(
            forward=[1 + 0.1 * stage for stage in range(stages)], message=0.3, latency=0.1, unshard=0.7,
            reduce_grad=0.4, overlap=0.9, slow_down=1.25,
        )  # fmt: skip
        encoded = with_messages(encode(schedule))
        for one_stream in (False, True):
            arguments = (encoded, costs.durations(stages), costs.overlap, costs.slow_down, one_stream)
            compiled, plain = pipeline_work(*arguments), work_twin.pipeline_work(*arguments)
            for field, one, other in zip(work.Work._fields, compiled, plain, strict=True):
                assert one.tolist() == other.tolist(), (seed, field)
            for one, other in zip(work.run(compiled), engine_twin.run(plain), strict=True):
                assert one.tolist() == other.tolist(), seed


def test_two_ranks_by_hand() -> None:
    result = simulate_cost(table(*TWO_RANKS), PipelineCosts(forward=2.0, message=0.5, latency=0.25))
    times = {str(timed.action): (timed.start, timed.end) for timed in map(result.timed, range(len(result.times.ends)))}
    assert times["0SEND_F0"] == (2.0, 2.75)
    assert times["1F0"] == (2.75, 4.75)
    assert times["1B0"] == (4.75, 6.75)
    assert times["1F1"] == (6.75, 8.75)
    assert times["1B1"] == (8.75, 10.75)
    assert times["0B1"] == (11.5, 13.5)
    assert result.makespan == 13.5
    assert result.busy == (8.0, 8.0)
    assert result.bubbles == (5.5, 5.5)
    assert result.spans == ((0.0, 13.5), (2.75, 10.75))
    assert result.bubbles_in_span == (5.5, 0.0)
    # Rank 0 waits while the message of 0F1 is sent, from 4 to 4.75, and while those of 1B0 and 1B1 arrive. Rank 1 waits
    # while the message of 0F0 arrives and that of 1B1 is sent.
    assert result.exposed == (2.25, 1.5)
    assert [str(timed.action) for timed in result.critical_path] == [
        "0F0", "0SEND_F0", "1RECV_F0", "1F0", "1B0", "1F1", "1B1", "1SEND_B1", "0RECV_B1", "0B1",
    ]  # fmt: skip
    assert [use[:2] for use in result.memory(0)] == [(0.0, 1.0), (2.0, 2.0), (9.5, 1.0), (13.5, 0.0)]
    assert result.peak_memory(0) == 3.0, "the peak is two activations and the parameters"


def test_sends_gathers_and_reductions_share_the_copy_engine_and_slow_compute_down() -> None:
    schedule = table("0UNSHARD,0F0,0F1,0B0,0B1,0REDUCE_GRAD,0RESHARD")
    costs = PipelineCosts(unshard=2.0, reduce_grad=3.0, slow_down=2.0)
    result = simulate_cost(schedule, costs)
    assert result.spans == ((2.0, 8.0),)
    assert (result.makespan, result.exposed) == (11.0, (5.0,))
    # Here nothing computes during the gather. With two stages, the second one is gathered while the first computes.
    two = table("0UNSHARD,1UNSHARD,0F0,1F0", placement=(0, 0))
    assert simulate_cost(two, PipelineCosts(unshard=[1.0, 0.5], slow_down=2.0)).makespan == 2.0 + 0.75 + 0.5
    # The gather of stage 2 occupies the copy engine when the result of 0F0 is ready to be sent.
    sends = table("0UNSHARD,0F0,0SEND_F0,2UNSHARD,2RECV_F0,2F0", "1RECV_F0,1UNSHARD,1F0,1SEND_F0", placement=(0, 1, 0))
    times = simulate_cost(sends, PipelineCosts(unshard=[1.0, 0.0, 3.0], message=1.0))
    assert times.timed(2).start == 4.0


def test_a_gathering_waits_for_the_memory_that_is_freed_before_it() -> None:
    schedule = table("0UNSHARD,0F0,0RESHARD,1UNSHARD,1F0,1RESHARD", placement=(0, 0))
    result = simulate_cost(schedule, PipelineCosts(unshard=1.0))
    assert result.makespan == 4.0
    assert [(use.time, use.parameters) for use in result.memory(0)][1:] == [
        (1.0, 1.0), (2.0, 1.0), (3.0, 1.0), (4.0, 0.0),
    ]  # fmt: skip


def test_a_split_backward_gives_its_memory_back_in_two_parts() -> None:
    costs = PipelineCosts(activation=4.0, kept=1.0, parameters=0.0)
    result = simulate_cost(table("0F0,0I0,0W0"), costs)
    assert [use[:2] for use in result.memory(0)] == [(0.0, 4.0), (2.0, 1.0), (3.0, 0.0)]
    assert [use[:2] for use in simulate_cost(table("0F0,0B0"), costs).memory(0)] == [(0.0, 4.0), (3.0, 0.0)]


def test_a_compound_takes_its_share_of_its_parts() -> None:
    schedule = table("0F0,(0F1;0B0)OVERLAP_F_B,0B1")
    assert simulate_cost(schedule, PipelineCosts(overlap=0.75)).makespan == 1.0 + 0.75 * 3.0 + 2.0


def test_where_receives_stand_matters_only_in_one_stream() -> None:
    early = lowered("0F0,1F0,1B0,0B0", "2F0,2B0", placement=(0, 0, 1))
    assert simulate_cost(early).makespan == simulate_cost(early, PipelineCosts(one_receive_stream=True)).makespan
    dual = generate("DualPipe", 4, 8)
    one = PipelineCosts(one_receive_stream=True)
    assert simulate_cost(dual, one).makespan > simulate_cost(dual).makespan


def test_a_message_travels_while_it_is_sent_even_if_its_receive_waits_behind_another() -> None:
    schedule = table(
        "0F0,0SEND_F0,0F1,0SEND_F1",
        "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1RECV_F1,1F1",
        "2RECV_F0,2F0,2B0,2SEND_B0",
    )
    for one in (False, True):
        result = simulate_cost(schedule, PipelineCosts(forward=0.5, message=[1.0, 0.0, 0.0], one_receive_stream=one))
        # The messages travel from 0.5 to 1.5 and from 1.5 to 2.5. Rank 1 computes 1F0 from 1.5 to 2.
        assert result.exposed[1] == 1.5, one


@pytest.mark.parametrize("one_stream", [False, True])
def test_exposed_communication_is_the_time_of_moving_without_computing(one_stream: bool) -> None:
    for seed in range(60):
        schedule = lower(random_compute(seed))
        costs = PipelineCosts(
            forward=0.5, message=0.75, latency=0.25, unshard=0.5, reduce_grad=1.0, one_receive_stream=one_stream
        )
        result = simulate_cost(schedule, costs)
        timed = [result.timed(number) for number in range(len(result.times.ends))]
        sends = {(ran.action.kind, ran.action.stage, ran.action.microbatch): ran for ran in timed}
        for rank in range(schedule.ranks):
            computes, moves = [], []
            for ran in (ran for ran in timed if ran.rank == rank):
                stage, kind, microbatch, _ = ran.action
                if kind in ("F", "I", "W", "B"):
                    computes.append((ran.start, ran.end))
                elif kind in ("SEND_F", "SEND_B", "UNSHARD", "REDUCE_GRAD"):
                    moves.append((ran.start, ran.end))
                elif kind in ("RECV_F", "RECV_B"):
                    sender = stage - 1 if kind == "RECV_F" else stage + 1
                    moves.append(sends[kind.replace("RECV", "SEND"), sender, microbatch][2:])
            times = sorted({time for interval in [*computes, *moves] for time in interval})
            exposed = sum(
                end - start
                for start, end in pairwise(times)
                if any(first <= start and end <= last for first, last in moves)
                and not any(first <= start and end <= last for first, last in computes)
            )
            assert result.exposed[rank] == pytest.approx(exposed), (seed, rank)


def test_all_that_lowering_puts_can_be_run() -> None:
    for name in GENERATORS:
        schedule = generate(name, 4, 16)
        complete = simulate_cost(lower(schedule, waits=True), PipelineCosts(forward=0.5, unshard=0.25, message=0.125))
        assert complete.makespan > simulate_cost(schedule, PipelineCosts(forward=0.5)).makespan, name


def test_a_schedule_that_deadlocks_is_refused() -> None:
    broken = changed(lowered(*TWO_RANKS), drop(0, "0SEND_F1"))
    with pytest.raises(ValueError, match=r"some rank waits for ever.*`verify` names it"):
        simulate_cost(broken)


def test_nothing_takes_no_time() -> None:
    result = simulate_cost(Schedule((), (), 0))
    assert (result.makespan, result.longest_span, result.critical_path, result.exposed) == (0.0, 0.0, (), ())


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"forward": -1.0}, r"forward is -1.0: costs are finite numbers that are at least 0"),
        ({"message": [1.0, float("nan")]}, "message is .*finite"),
        ({"slow_down": 0.5}, "slow_down is 0.5: costs are finite numbers that are at least 1"),
        ({"bandwidth": 0.0}, "bandwidth is 0"),
        ({"weight_grad": [1.0, 2.0, 3.0]}, "weight_grad has 3 numbers, but there are 2 stages: give one, or 2"),
    ],
)
def test_costs_that_cannot_be_are_refused(wrong: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        simulate_cost(table(*TWO_RANKS), PipelineCosts(**wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward": None},
        {"input_grad": None},
        {"activation": [1.0, None]},
        {"overlap": None},
        {"bandwidth": [1.0, 1.0]},
        {"latency": "1"},
    ],
)
def test_costs_that_are_not_numbers_are_refused(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(TypeError, match=rf"{name} is .*: give a number"):
        PipelineCosts(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [np.float32(2.0), np.int64(2), Fraction(2), Decimal(2)])
def test_costs_may_be_numbers_of_any_kind(number: Any) -> None:
    wanted = simulate_cost(table(*TWO_RANKS), PipelineCosts(forward=2.0, latency=2.0)).makespan
    costs = PipelineCosts(forward=[number, number], latency=number, one_receive_stream=np.bool_(False))  # type: ignore[arg-type]
    assert simulate_cost(table(*TWO_RANKS), costs).makespan == wanted


def test_memory_that_is_freed_and_taken_at_one_time_is_not_counted_twice() -> None:
    """Times that are this close count as equal, so a forward may start slightly before its memory is freed."""
    changes = [(0.0, 1.0, 0.0), (2.0 - 1e-10, 1.0, 0.0), (2.0, -1.0, 0.0), (3.0, -1.0, 0.0)]
    assert max(use.activations for use in _summed(changes, 0.0)) == 1.0
