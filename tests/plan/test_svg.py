"""The image of a timeline can be understood without knowledge of the plan."""

import itertools
from xml.etree import ElementTree

import pytest

from symm_overlap.collective.planners import all_gather_consume, gather_then_consume, produce_reduce_scatter
from symm_overlap.plan import Costs, draw, kind, plan_calls, simulate
from symm_overlap.plan.draw import labels

TWO = ("compute0", "compute1")
SVG = "{http://www.w3.org/2000/svg}"
CASES = {
    "reduce-scatter": (produce_reduce_scatter, 3, {"chunks": 2, "compute": TWO}),
    "all-gather": (all_gather_consume, 8, {"chunks": 4}),
    "sequential": (gather_then_consume, 4, {}),
}


@pytest.fixture(params=CASES, scope="module")
def timeline(request):
    planner, world, arguments = CASES[request.param]
    return simulate(plan_calls(planner, world, 1, **arguments))


def parts(timeline, tag, name=None, **arguments):
    """Return the elements of an image with this tag, and with the class ``name`` if it is given."""
    root = ElementTree.fromstring(draw.svg(timeline, **arguments))
    return [each for each in root.iter(f"{SVG}{tag}") if name is None or each.get("class") == name]


def boxes(timeline, **arguments):
    return [rect for rect in parts(timeline, "rect", **arguments) if rect.find(f"{SVG}title") is not None]


@pytest.mark.parametrize("width", [900, 1200])
def test_there_is_a_box_for_each_step_and_an_arrow_for_each_signal(timeline, width):
    root = ElementTree.fromstring(draw.svg(timeline, width=width))
    assert root.get("width") == str(width)
    assert len(boxes(timeline, width=width)) == len(timeline.events)
    for box in boxes(timeline, width=width):
        assert 0 <= float(box.get("x")) <= float(box.get("x")) + float(box.get("width")) <= width
        assert 0 <= float(box.get("y")) < float(root.get("height"))
    rows = {(event.at.rank, event.at.step.stream) for event in timeline.events}
    assert len({box.get("y") for box in boxes(timeline, width=width)}) == len(rows), "a row for each stream"
    arrows = [line for line in root.iter(f"{SVG}line") if line.get("marker-end")]
    assert len(arrows) == len(timeline.signals) > 0
    names = [text.text for text in root.iter(f"{SVG}text")]
    assert all(f"rank {rank}  {stream}" in names for rank, stream in rows)


def test_the_title_says_which_op_on_how_many_ranks_in_how_many_chunks():
    title = parts(simulate(plan_calls(produce_reduce_scatter, 3, 1, chunks=2)), "text")[0]
    assert title.text == "produce_reduce_scatter: 3 ranks, 2 chunks a rank"
    title = parts(simulate(plan_calls(gather_then_consume, 1, 2)), "text")[0]
    assert title.text == "gather_then_consume: 1 rank, 1 chunk a rank, 2 calls"


@pytest.mark.parametrize("factor", [0.001, 1.0, 73.0])
def test_the_axis_is_in_milliseconds_with_ticks_at_round_times(factor):
    costs = Costs(compute=factor, copy=factor / 2, meet=0.0, sleep=0.0, tail=0.0)
    timeline = simulate(plan_calls(produce_reduce_scatter, 3, 1), costs)
    ticks = {float(text.text): float(text.get("x")) for text in parts(timeline, "text", "tick")}
    assert 4 <= len(ticks) <= 12
    assert 0.0 in ticks
    assert max(ticks) <= timeline.makespan * 1.001
    (axis,) = parts(timeline, "text", "axis")
    assert axis.text == "time in ms"
    by_title = {box.find(f"{SVG}title").text: box for box in boxes(timeline)}
    for event in timeline.events:  # the position of a box matches the axis
        x = float(by_title[title_of(event)].get("x"))
        scale = (ticks[max(ticks)] - ticks[0.0]) / max(ticks)
        assert x == pytest.approx(ticks[0.0] + event.start * scale, abs=1.1)


def title_of(event):
    return f"{event.at.step}\n{event.start:.3f} to {event.end:.3f} ms, waited {event.waited:.3f} ms"


def test_the_legend_names_each_kind_that_occurs_beside_its_colour(timeline):
    names = parts(timeline, "text", "legend", width=500)
    assert {text.text for text in names} == {event.at.step.kind for event in timeline.events}
    squares = [rect for rect in parts(timeline, "rect", width=500) if rect.get("width") == "11"]
    assert len(squares) == len(names)
    for square, text in zip(squares, names, strict=True):
        assert square.get("fill") == kind(text.text).colour
        assert float(square.get("x")) < float(text.get("x")) < 500
    top = max(float(text.get("y")) for text in names)
    assert all(float(box.get("y")) > top for box in boxes(timeline, width=500))


@pytest.mark.parametrize("width", [400, 1200])
def test_every_box_is_labelled_on_it_or_above_it(timeline, width):
    root = ElementTree.fromstring(draw.svg(timeline, width=width))
    texts = [text for text in root.iter(f"{SVG}text") if text.get("class") in ("above", None)]
    for event, box in zip(by_row(timeline), boxes(timeline, width=width), strict=True):
        top, step = float(box.get("y")), event.at.step
        inside = [text.text for text in texts if float(text.get("y")) == top + 14]
        above = [text.text for text in texts if float(text.get("y")) == top - 4]
        words = {word for text in above for word in text.replace(",", " ").split()}
        wanted = set(labels.short(step).lstrip("!?").split(","))
        fits = labels.inside(step, float(box.get("width")))
        assert fits in inside if fits else wanted <= {word.lstrip("!?") for word in words}, step


def by_row(timeline):
    """Return the events in the order of their boxes: row by row."""
    rows = sorted({(event.at.rank, event.at.step.stream) for event in timeline.events})
    return [event for row in rows for event in timeline.events if (event.at.rank, event.at.step.stream) == row]


def test_labels_above_a_row_do_not_overlap(timeline):
    rows = sorted({(event.at.rank, event.at.step.stream) for event in timeline.events})
    for row in rows:
        events = [event for event in timeline.events if (event.at.rank, event.at.step.stream) == row]
        placed = labels.above([(1000 * event.start, event) for event in sorted(events, key=lambda each: each.start)])
        for left, right in itertools.pairwise(placed):
            assert left.end <= right.x


@pytest.mark.parametrize(
    ("width", "label"), [(80.0, "produce 1.0"), (40.0, "1.0"), (10.0, None)], ids=["wide", "narrow", "tiny"]
)
def test_a_box_is_labelled_with_what_fits(width, label):
    (step,) = (step for step in produce_reduce_scatter(0, 2).steps if step.chunk == (1, 0) and step.kind == "produce")
    assert labels.inside(step, width) == label


def test_a_plan_that_takes_no_time_has_an_image_too():
    timeline = simulate(plan_calls(gather_then_consume, 1, 1), lambda rank, step: (0.0, 0.0))
    assert [text.text for text in parts(timeline, "text", "tick")] == ["0"]
