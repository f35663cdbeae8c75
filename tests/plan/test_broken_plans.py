"""`verify` rejects broken plans, and reports the right kind of problem for each."""

from dataclasses import replace

import pytest

from symm_overlap.plan import Life, Plan, Region, Step, draw, simulate, verify

from .timelines import by_hand


def one_rank(*steps):
    return [[by_hand(0, 1, *steps, x=Life.CALL, y=Life.CALL)]]


def two_ranks(first, second):
    return [[by_hand(rank, 2, *steps, x=Life.CALL) for rank, steps in enumerate((first, second))]]


def kinds_of(calls):
    return [problem.kind for problem in verify(calls).problems]


X, Y = Region("x", 0, 0, 1), Region("y", 0, 0, 2)
FORK, JOIN = Step("fork", "s"), Step("join", "s")


def test_a_ring_of_waits_is_a_deadlock_and_names_the_ring():
    ranks = [
        [FORK, Step("wait", "s", peers=(1 - me,), channel=0), Step("signal", "s", peers=(1 - me,), channel=0), JOIN]
        for me in range(2)
    ]
    (problem,) = verify(two_ranks(*ranks)).problems
    assert problem.kind == "deadlock"
    assert {(at.rank, at.step.kind) for at in problem.steps} == {(0, "wait"), (1, "wait")}


def test_a_wait_that_nobody_signals_is_a_deadlock():
    calls = two_ranks([FORK, Step("wait", "s", peers=(1,), channel=0), JOIN], [FORK, JOIN])
    (problem,) = verify(calls).problems
    assert problem.kind == "deadlock"
    assert problem.steps[0].index == 1


def test_a_barrier_that_one_rank_does_not_reach_is_a_deadlock():
    barrier = Step("barrier", "s", channel=0)
    assert kinds_of(two_ranks([FORK, barrier, JOIN], [FORK, JOIN])) == ["deadlock"]
    assert kinds_of(two_ranks([FORK, barrier, JOIN], [FORK, barrier, JOIN])) == []


def test_barriers_in_another_order_are_a_deadlock():
    one, two = Step("barrier", "s", channel=0), Step("barrier", "s", channel=1)
    assert kinds_of(two_ranks([FORK, one, two, JOIN], [FORK, two, one, JOIN])) == ["deadlock"]


def test_a_signal_that_nobody_waits_for_is_left_over():
    calls = two_ranks([FORK, Step("signal", "s", peers=(1,), channel=2), JOIN], [FORK, JOIN])
    assert kinds_of(calls) == ["leftover signal"]


def test_two_streams_on_one_slot_are_refused():
    """Two streams may signal, or wait, on the same (peer, channel) only if a dependency orders them."""

    def signal(stream, after=()):
        return Step("signal", stream, peers=(1,), channel=0, after=after)

    wait = Step("wait", "s", peers=(0,), channel=0)
    waits = [FORK, wait, wait, JOIN]
    assert kinds_of(two_ranks([FORK, signal("s"), signal("t", (0,)), replace(JOIN, after=(2,))], waits)) == [
        "unordered signals"
    ]
    assert kinds_of(two_ranks([FORK, signal("s"), signal("t", (1,)), replace(JOIN, after=(2,))], waits)) == []
    signals = [FORK, replace(signal("s"), peers=(0,)), replace(signal("s"), peers=(0,)), JOIN]
    waits = [
        FORK,
        replace(wait, peers=(1,)),
        replace(wait, peers=(1,), stream="t", after=(0,)),
        replace(JOIN, after=(2,)),
    ]
    assert kinds_of(two_ranks(waits, signals)) == ["unordered waits"]


def test_writes_and_reads_of_two_streams_race():
    for first, second in [("writes", "writes"), ("writes", "reads"), ("reads", "writes")]:
        steps = [
            FORK,
            Step("publish", "s", writes=(X, Y)),
            Step("pull", "s", **{first: (X,)}),
            Step("pull", "t", after=(1,), **{second: (X,)}),
            Step("join", "s", after=(3,)),
        ]
        (problem,) = verify(one_rank(*steps)).problems
        assert problem.kind == "data race"
        assert {at.index for at in problem.steps} == {2, 3}
        steps[3] = replace(steps[3], after=(2,))
        assert kinds_of(one_rank(*steps)) == []


def test_two_reads_do_not_race():
    write = Step("publish", "s", writes=(X,))
    reads = [Step("pull", "s", reads=(X,)), Step("pull", "t", reads=(X,), after=(1,))]
    assert kinds_of(one_rank(FORK, write, *reads, Step("join", "s", after=(3,)))) == []


def test_a_race_with_a_write_behind_ordered_ones_is_found():
    """The read races with two later writes, which are ordered among themselves. The race must still be found, although
    the read is compared only with the last write.
    """
    steps = [
        Step("fork", "s", writes=(X,)),
        Step("pull", "t", reads=(X,), after=(0,)),
        Step("pull", "s", writes=(X,)),
        Step("pull", "s", writes=(X,)),
        Step("join", "s", after=(1,)),
    ]
    assert kinds_of(one_rank(*steps)) == ["data race"]


def test_memory_of_the_last_call_is_stale():
    """A read of memory that this call has not written is a stale read."""
    writes = one_rank(Step("fork", "s", writes=(X,)), JOIN)
    reads = one_rank(FORK, Step("join", "s", reads=(X,)))
    assert kinds_of(writes + reads) == ["stale read"]
    assert kinds_of(reads) == ["stale read"], "the memory was never written"


def test_a_part_of_an_output_that_is_not_written_is_stale():
    write = Step("consume", "s", writes=(Region("y", 0, 0, 1),))
    assert kinds_of(one_rank(FORK, write, Step("join", "s", reads=(Y,)))) == ["stale read"]


def test_an_output_is_written_once_but_may_be_added_to():
    write, add = Step("consume", "s", writes=(X,)), Step("consume", "s", reads=(X,), writes=(X,))
    join = Step("join", "s", reads=(X,))
    assert kinds_of(one_rank(FORK, write, write, join)) == ["written twice"]
    for writes in ((X, X), (X, Region("x", 0, 0, 2))):  # by one step
        assert kinds_of(one_rank(FORK, Step("consume", "s", writes=writes), join)) == ["written twice"]
    assert kinds_of(one_rank(FORK, write, add, add, join)) == []


def test_a_stream_that_leaves_the_call_is_refused():
    """Every stream must follow the fork, and the join must follow every stream."""
    pull = Step("pull", "t", after=(0,))
    assert kinds_of(one_rank(FORK, pull, JOIN)) == ["unjoined"]
    assert kinds_of(one_rank(FORK, replace(pull, after=()), replace(JOIN, after=(1,)))) == ["unforked"]
    assert kinds_of(one_rank(FORK, pull, replace(JOIN, after=(1,)))) == []


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (Step("teleport", "s"), "kind 'teleport' is not registered"),
        (Step("pull", "s", after=(5,)), "after is (5,)"),
        (Step("pull", "s", after=(0,)), "after is (0,)"),
        (Step("signal", "s", peers=(0,), channel=0), "peers are (0,): name other ranks of 0..1, each once"),
        (Step("wait", "s", peers=(2,), channel=0), "peers are (2,)"),
        (Step("wait", "s", channel=0), "peers are ()"),
        (Step("signal", "s", peers=(1, 1), channel=0), "peers are (1, 1)"),
        (Step("wait", "s", peers=(1,)), "channel is None"),
        (Step("barrier", "s", channel=-1), "channel is -1"),
        (Step("sleep", "s", reads=(X,)), "a sleep may not read or write memory"),
        (Step("pull", "s", reads=(Region("x", 7, 0, 1),)), "no such region: x@7[0]"),
        (Step("pull", "s", reads=(Region("x", 0, 1, 1),)), "no such region"),
    ],
)
def test_what_no_executor_could_run_is_malformed(step, said):
    (problem,) = verify(two_ranks([FORK, step, JOIN], [FORK, JOIN])).problems
    assert problem.kind == "malformed"
    assert said in str(problem)


def test_plans_must_be_whole_and_complete():
    plan = Plan("made_by_hand", 0, 2, (FORK, JOIN))
    assert kinds_of([[plan]]) == ["malformed"], "rank 1 of 2 is missing"
    assert kinds_of([[plan, plan]]) == ["malformed"], "rank 0 twice"
    assert kinds_of(one_rank(FORK)) == ["malformed"]
    assert kinds_of(one_rank(FORK, Step("join", "t", after=(0,)))) == ["malformed"]


def test_contracts_are_contracts():
    with pytest.raises(TypeError, match="contracts has 'sum', which is no Contract"):
        verify([[by_hand(0, 1, FORK, JOIN)]], contracts=["sum"])


@pytest.mark.parametrize("function", [simulate, draw.text])
def test_what_has_no_order_has_no_picture_and_no_time(function):
    with pytest.raises(ValueError, match=r"step 1: pull on t: after is \(5,\): it may name only earlier steps"):
        function(one_rank(FORK, Step("pull", "t", after=(5,)), JOIN))
    with pytest.raises(ValueError, match=r"plans of \[2, 1\] ranks: all need the same number"):
        function([*two_ranks([FORK, JOIN], [FORK, JOIN]), *one_rank(FORK, JOIN)])


def test_two_streams_with_barriers_on_one_channel_are_refused():
    """Either barrier of rank 0 may meet the first barrier of rank 1, so rank 1 may read before rank 0 has written."""
    barrier = Step("barrier", "s", channel=0)
    beside = replace(barrier, stream="t", after=(0,))
    writer = [FORK, Step("publish", "s", writes=(X,)), barrier, beside, replace(JOIN, after=(3,))]
    reader = [FORK, barrier, Step("pull", "s", reads=(X,)), barrier, JOIN]
    assert kinds_of(two_ranks(writer, reader)) == ["unordered barriers"]
    writer[3] = replace(writer[3], after=(2,))
    assert kinds_of(two_ranks(writer, reader)) == []
    writer[3] = replace(writer[3], after=(0,), channel=1)
    reader[3] = replace(reader[3], channel=1)
    assert kinds_of(two_ranks(writer, reader)) == []


def test_waits_that_only_the_awaited_signals_order_are_refused():
    """Rank 1 sends its second signal once rank 0 has returned from its first wait. But stream t of rank 0 may be at its
    wait before stream s, and take the first signal. Then rank 0 never answers.
    """
    signal, wait = (Step(kind, "s", peers=(1,), channel=0) for kind in ("signal", "wait"))
    answered = [FORK, wait, signal, replace(wait, stream="t", after=(0,)), replace(JOIN, after=(3,))]
    signals, answer = (replace(step, peers=(0,)) for step in (signal, wait))
    asking = [FORK, signals, answer, signals, JOIN]
    assert kinds_of(two_ranks(answered, asking)) == ["unordered waits"]
    answered[3] = replace(answered[3], after=(1,))
    assert kinds_of(two_ranks(answered, asking)) == []
