"""A layer may register its own kinds of steps and declare persistent buffers. All tools for plans handle them by their
records.

The layer in this test is a pipeline of two stages. Rank 0 computes a microbatch and sends it to a slot of rank 1. Rank
1 computes with it, and signals that the slot is free.
"""

import ast
from pathlib import Path
from xml.etree import ElementTree

import pytest

import symm_overlap.plan
from symm_overlap.plan import (
    Builder,
    Costs,
    InlineStreams,
    Kind,
    Life,
    Plan,
    Region,
    Step,
    ThreadStreams,
    draw,
    execute,
    register,
    simulate,
    verify,
)
from symm_overlap.plan.testing import redundant

FORWARD = register(Kind("stage_forward", "SMs", "compute", "#010203"))
SEND = register(Kind("stage_send", "copy engine", "meet", "#040506", meets="posts"))
RECEIVE = register(Kind("stage_receive", "", "meet", "#070809", meets="awaits"))
NAMES = [FORWARD.name, SEND.name, RECEIVE.name]

BUFFERS = {
    "microbatches": Life.INPUT,
    "parameters": Life.PERSISTENT,
    "activations": Life.SCRATCH,
    "slot": Life.PERSISTENT,
    "results": Life.OUTPUT,
}
SLOT = Region("slot", 1, 0, 1)


def first_stage(microbatches, credits):
    plan = Builder("pipeline", 0, 2, stream="main", buffers=BUFFERS, inputs={"microbatches": microbatches})
    for index in range(microbatches):
        activation = plan.here("activations", index)
        reads = [plan.here("microbatches", index), plan.here("parameters", 0)]
        computed = plan.add(FORWARD.name, "main", reads=reads, writes=[activation], chunk=(0, index))
        if credits:
            plan.add("wait", "send", peers=(1,), channel=1, label="[free]")
        plan.add(
            SEND.name,
            "send",
            reads=[activation],
            writes=[SLOT],
            after=[computed],
            peers=(1,),
            channel=0,
            chunk=(0, index),
        )
    return plan.finish()


def second_stage(microbatches, credits):
    plan = Builder("pipeline", 1, 2, stream="main", buffers=BUFFERS, inputs={"microbatches": microbatches})
    for index in range(microbatches):
        if credits:
            plan.add("signal", "main", peers=(0,), channel=1, label="[free]")
        plan.add(RECEIVE.name, "main", peers=(0,), channel=0, chunk=(0, index))
        reads = [SLOT, plan.here("parameters", 0)]
        plan.add(FORWARD.name, "main", reads=reads, writes=[plan.here("results", index)], chunk=(0, index))
    return plan.finish(plan.here("results", 0, microbatches))


def pipeline(calls=1, microbatches=3, credits=True):
    return [[first_stage(microbatches, credits), second_stage(microbatches, credits)] for _ in range(calls)]


def test_verify_proves_its_plans_and_each_synchronisation_is_needed():
    verify(pipeline(calls=3)).raise_for_problems()
    assert redundant(pipeline(calls=3)) == []


def test_verify_finds_a_send_into_a_slot_that_is_in_use():
    problems = verify(pipeline(credits=False)).problems
    assert {problem.kind for problem in problems} == {"data race"}
    kinds = {tuple(at.step.kind for at in problem.steps) for problem in problems}
    assert kinds == {(SEND.name, FORWARD.name)}


def test_verify_finds_a_receive_that_nobody_sends():
    short = pipeline(microbatches=1)[0][0]
    problems = verify([[short, pipeline(microbatches=2)[0][1]]]).problems
    assert {problem.kind for problem in problems} == {"deadlock", "leftover signal"}


def test_a_send_has_one_peer_where_a_signal_may_have_several():
    def plan(kind):
        step = Step(kind, "s", peers=(1, 2), channel=0)
        return Plan("broadcast", 0, 3, (Step("fork", "s"), step, Step("join", "s")))

    others = [Plan("broadcast", rank, 3, (Step("fork", "s"), Step("join", "s"))) for rank in (1, 2)]
    kinds = {kind: [each.kind for each in verify([[plan(kind), *others]]).problems] for kind in (SEND.name, "signal")}
    assert kinds == {SEND.name: ["malformed"], "signal": ["leftover signal"] * 2}


def test_simulate_asks_the_records_what_a_step_occupies_and_how_long_it_takes():
    costs = Costs({SEND.name: 0.5}, compute=1.0, tail=0.0, meet=0.0)
    timeline = simulate(pipeline(), costs)
    times = {(event.at.rank, event.at.step.kind, event.at.step.chunk): event for event in timeline.events}
    send, forward = (times[rank, kind, (0, 0)] for rank, kind in ((0, SEND.name), (1, FORWARD.name)))
    assert (send.start, send.end) == (1.0, 1.5), "at the same time as the next microbatch, on the copy engine"
    assert (forward.start, forward.end) == (1.5, 2.5), "after the microbatch has arrived"
    assert timeline.makespan == 5.5, "with one slot, a send waits until the previous microbatch is computed"
    assert (timeline.compute, timeline.communication) == (3.0, 1.5)
    assert times[1, RECEIVE.name, (0, 0)].waited == 1.5
    assert timeline.busy[1, "main"] == 3.0


def test_a_send_pairs_with_its_receive():
    pairs = [(post.at.step.kind, awaits.at.step.kind) for post, awaits in simulate(pipeline()).signals]
    assert sorted(pairs) == sorted([("signal", "wait")] * 3 + [(SEND.name, RECEIVE.name)] * 3)


def test_text_shows_a_send_and_a_receive_as_steps_of_their_own():
    picture = draw.text(pipeline(microbatches=1), width=200)
    rows = {line.split("|")[0].strip(): line for line in picture.splitlines() if line}
    assert rows["rank 0  send"].split() == ["rank", "0", "send", "|", "?1", "stage_send", "0", "to", "1"]
    assert rows["rank 1  main"].split("|")[1].split()[1:6] == ["!0", "stage_receive", "0", "from", "0"]
    sent, received = rows["rank 0  send"].index("stage_send"), rows["rank 1  main"].index("stage_receive")
    assert sent < received, "in a later column than the send"


def test_images_use_the_records_colours():
    image = draw.svg(simulate(pipeline()))
    root = ElementTree.fromstring(image)
    colours = {rect.get("fill") for rect in root.iter("{http://www.w3.org/2000/svg}rect")}
    assert {FORWARD.colour, SEND.colour, RECEIVE.colour} <= colours
    assert {event.get("cat") for event in draw.trace(simulate(pipeline()))["traceEvents"]} >= set(NAMES)


@pytest.mark.parametrize("make", [InlineStreams, ThreadStreams])
def test_its_steps_are_executed(make):
    done = []
    execute(pipeline()[0][0], {name: lambda step: done.append(step.kind) for name in NAMES}, make())
    assert sorted(done) == sorted([FORWARD.name, SEND.name] * 3)


OWN_KINDS = {"fork", "join", "sleep", "signal", "wait", "barrier"}
KNOWN = {"publish", "pull", "push", "announce", "produce", "consume", "reduce", "send", "receive", "recv", "forward"}


@pytest.mark.parametrize(
    "path", sorted(Path(symm_overlap.plan.__file__).parent.rglob("*.py")), ids=lambda path: path.stem
)
def test_no_module_of_the_core_names_a_kind_of_another_layer(path):
    strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    assert not strings & KNOWN
    if path.stem == "kinds":
        assert strings >= OWN_KINDS
