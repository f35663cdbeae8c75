"""Costs that are measured on a simulated step are its own costs, so simulating them gives the same step again."""

import pytest

from symm_overlap.pipeline import Action, PipelineCosts, simulate_cost
from symm_overlap.pipeline.drawing import side_by_side, timeline, timeline_of, trace
from symm_overlap.pipeline.generators import GENERATORS, generate
from symm_overlap.pipeline.lowering import lower
from symm_overlap.pipeline.measured import TimedAction, measured_costs, span
from symm_overlap.plan import draw


def costs_of(stages):
    """Return costs that differ from stage to stage."""
    return PipelineCosts(
        forward=[2.0 + stage / 8 for stage in range(stages)],
        input_grad=[2.5 + stage / 16 for stage in range(stages)],
        weight_grad=[1.25 + stage / 32 for stage in range(stages)],
        message=[0.5 + stage / 64 for stage in range(stages)],
    )


def rows_of(result):
    """Return a simulated step as a record of each rank. The parts of a compound are recorded one after the other."""
    rows = []
    for rank in range(result.encoded.ranks):
        rows.append([])
        for number in range(result.encoded.starts[rank], result.encoded.starts[rank + 1]):
            timed = result.timed(number)
            start = timed.start
            for part in timed.action.leaves:
                end = timed.end
                if timed.action.parts:
                    name = {"F": "forward", "I": "input_grad", "B": "full_backward"}[part.kind]
                    end = start + result.costs.each(name, len(result.encoded.placement))[part.stage]
                rows[-1].append(TimedAction(part, start, end))
                start = end
    return rows


@pytest.mark.parametrize("name", GENERATORS)
def test_a_simulated_step_is_simulated_again_by_what_is_measured_on_it(name):
    schedule = lower(generate(name, 4, 8))
    result = simulate_cost(schedule, costs_of(schedule.stages))
    rows = rows_of(result)
    assert span(rows) == pytest.approx(result.makespan)
    found = measured_costs(schedule, [rows, rows])
    assert simulate_cost(schedule, found).makespan == pytest.approx(result.makespan, rel=1e-12)
    assert list(found.forward) == pytest.approx(list(result.costs.forward))


def test_the_median_of_the_steps_counts():
    schedule = generate("GPipe", 1, 1)
    steps = [
        [[TimedAction(Action(0, "F", 0), 0.0, forward), TimedAction(Action(0, "B", 0), forward, forward + 1)]]
        for forward in (1.0, 2.0, 100.0)
    ]
    found = measured_costs(schedule, steps)
    assert (found.forward, found.full_backward, found.input_grad, found.latency) == ([2.0], [1.0], [0.0], 0.0)


def test_steps_without_a_forward_are_refused():
    with pytest.raises(ValueError, match="no forward of stage 1 was measured"):
        measured_costs(generate("GPipe", 2, 1), [[[TimedAction(Action(0, "F", 0), 0.0, 1.0)], []]])


def test_a_step_without_actions_has_no_span():
    with pytest.raises(ValueError, match="the step has no actions"):
        span([[], []])


def test_a_message_that_was_there_already_says_nothing_of_the_latency():
    schedule = lower(generate("GPipe", 2, 1))
    rows = [
        [TimedAction(Action(0, "F", 0), 0.0, 1.0), TimedAction(Action(0, "SEND_F", 0), 1.0, 2.0)],
        [TimedAction(Action(1, "RECV_F", 0), 5.0, 9.0), TimedAction(Action(1, "F", 0), 9.0, 10.0)],
    ]
    assert measured_costs(schedule, [rows]).latency == 0.0
    rows[1][0] = TimedAction(Action(1, "RECV_F", 0), 1.5, 2.75)
    assert measured_costs(schedule, [rows]).latency == 0.75


def test_a_measured_step_is_drawn_like_a_simulated_one():
    schedule = lower(generate("ZBV", 2, 4))
    result = simulate_cost(schedule, costs_of(4))
    assert timeline_of(schedule.placement, rows_of(result)) == timeline(result)


def test_traces_side_by_side_keep_all_events_apart():
    schedule = lower(generate("1F1B", 2, 2))
    result = simulate_cost(schedule, costs_of(2))
    measured, simulated = draw.trace(timeline(result)), trace(result)
    found = side_by_side({"measured": measured, "simulated": simulated})["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert names == {0: "rank 0, measured", 1: "rank 0, simulated", 2: "rank 1, measured", 3: "rank 1, simulated"}
    for place, one in enumerate((measured, simulated)):
        kept = [event for event in found if event["pid"] % 2 == place and event["name"] != "process_sort_index"]
        assert len(kept) == len(one["traceEvents"])
    arrows = [event["id"] for event in found if event["ph"] == "s"]
    assert len(set(arrows)) == len(arrows) == 8
