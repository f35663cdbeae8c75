"""The lifetime of a buffer decides which accesses conflict, and which plans are malformed."""

from dataclasses import replace

import pytest

from symm_overlap.plan import Life, Plan, Region, Step, verify

from .timelines import by_hand, one_rank

FORK, JOIN = Step("fork", "s"), Step("join", "s")
X = Region("x", 0, 0, 1)
WRITE, READ = Step("consume", "s", writes=(X,)), Step("consume", "s", reads=(X,))


def kinds_of(calls, halves=None):
    return [problem.kind for problem in verify(calls, halves).problems]


def meet(rank, index, label):
    """Return a signal to the other rank and a wait for it. After both ranks have run them, both have come so far."""
    return [Step(kind, "s", peers=(1 - rank,), channel=index, label=label) for kind in ("signal", "wait")]


@pytest.mark.parametrize("life", [Life.INPUT, Life.OUTPUT, Life.CALL, Life.SCRATCH])
def test_what_does_not_outlive_the_call_is_written_before_it_is_read(life):
    assert kinds_of(one_rank(FORK, READ, JOIN, x=life)) == ["stale read"]
    writes = Step("fork", "s", writes=(X,))
    assert kinds_of(one_rank(writes, JOIN, x=life) + one_rank(FORK, READ, JOIN, x=life)) == ["stale read"]


def test_an_input_is_not_written():
    given = Step("fork", "s", writes=(X,))
    assert kinds_of(one_rank(given, READ, JOIN, x=Life.INPUT)) == []
    assert kinds_of(one_rank(given, READ, WRITE, JOIN, x=Life.INPUT)) == ["write to an input"]
    peer = [by_hand(0, 2, given, *meet(0, 0, ""), JOIN, x=Life.INPUT)]
    peer += [by_hand(1, 2, FORK, WRITE, *meet(1, 0, ""), JOIN, x=Life.INPUT)]
    assert "write to an input" in kinds_of([peer])


def test_an_output_is_written_where_the_join_reads_it():
    result = Step("join", "s", reads=(X,))
    assert kinds_of(one_rank(FORK, WRITE, result, x=Life.OUTPUT)) == []
    for beyond in (Region("x", 0, 1, 2), Region("x", 0, 0, 2)):
        write = Step("consume", "s", writes=(beyond,))
        (problem,) = verify(one_rank(FORK, *([WRITE] if beyond.start else []), write, result, x=Life.OUTPUT)).problems
        assert problem.kind == "write beyond an output"
        assert "unit 1 of x@0" in problem.text
    assert kinds_of(one_rank(FORK, WRITE, JOIN, x=Life.OUTPUT)) == ["write beyond an output"]


def test_all_calls_have_the_same_ranks():
    for calls in ([], [[]], [*one_rank(FORK, JOIN), [by_hand(rank, 2, FORK, JOIN) for rank in range(2)]]):
        (problem,) = verify(calls).problems
        assert problem.kind == "malformed"
        assert "all need the same number" in problem.text


def test_persistent_memory_may_be_read_before_the_call_has_written_it():
    calls = one_rank(FORK, READ, JOIN) + one_rank(FORK, READ, WRITE, JOIN) + one_rank(FORK, READ, JOIN)
    assert kinds_of(calls) == []


def test_accesses_of_different_calls_to_persistent_memory_must_be_ordered():
    writer, reader = by_hand(0, 2, FORK, WRITE, JOIN), by_hand(1, 2, FORK, READ, JOIN)
    idle = [by_hand(rank, 2, FORK, JOIN) for rank in range(2)]
    for calls in ([[writer, idle[1]], [idle[0], reader]], [[idle[0], reader], [writer, idle[1]]]):
        assert kinds_of(calls) == ["data race"]
        meeting = [by_hand(rank, 2, FORK, *meet(rank, 0, "[done]"), JOIN) for rank in range(2)]
        assert kinds_of([calls[0], meeting, calls[1]]) == []


def test_calls_alternate_between_the_halves_of_the_workspace():
    """Rank 1 may read late what rank 0 wrote, because the next call uses the other half of the workspace. The call
    after that overwrites it, which is a race.
    """
    far = Region("x", 0, 5, 6)
    ready = [Step("signal", "s", peers=(1,), channel=0), Step("wait", "s", peers=(0,), channel=0)]
    call = [
        by_hand(0, 2, FORK, Step("publish", "s", writes=(X, far)), ready[0], JOIN, x=Life.CALL),
        by_hand(1, 2, FORK, ready[1], Step("pull", "s", reads=(X,)), JOIN, x=Life.CALL),
    ]
    assert kinds_of([call] * 2) == []
    problems = verify([call] * 3).problems
    assert [problem.kind for problem in problems] == ["data race"]
    reader, writer = problems[0].steps
    assert (reader.call, reader.rank, reader.step.kind) == (0, 1, "pull")
    assert (writer.call, writer.rank, writer.step.kind) == (2, 0, "publish")
    assert kinds_of([call] * 2, halves=[0, 0]) == ["data race"]
    assert kinds_of([call] * 2, halves=[1, 0]) == []


def test_any_write_to_a_half_conflicts_with_every_access_of_an_earlier_call_to_it():
    """Each call lays out its half again, so another buffer name or unit may be in the same memory."""
    other = Region("y", 0, 7, 8)

    def calls(second):
        ready = [Step("signal", "s", peers=(1,), channel=0), Step("wait", "s", peers=(0,), channel=0)]
        first = [
            by_hand(0, 2, FORK, WRITE, ready[0], JOIN, x=Life.CALL),
            by_hand(1, 2, FORK, ready[1], READ, JOIN, x=Life.CALL),
        ]
        write = Step("consume", "s", writes=(second,))
        life = {second.buffer: Life.CALL}
        return [first, [by_hand(0, 2, FORK, write, JOIN, **life), by_hand(1, 2, FORK, JOIN)]]

    assert kinds_of(calls(other), halves=[0, 0]) == ["data race"]
    assert kinds_of(calls(other), halves=[0, 1]) == []
    assert "y@0[7] reuses the half of the workspace where x@0[0] may be in use" in str(
        verify(calls(other), halves=[0, 0]).problems[0]
    )


def test_a_write_to_another_ranks_half_is_compared_with_that_ranks_accesses():
    mine, yours = (Region("x", rank, 0, 1) for rank in range(2))
    first = [by_hand(0, 2, FORK, WRITE, JOIN, x=Life.CALL), by_hand(1, 2, FORK, JOIN)]
    for region, expected in ((mine, ["data race"]), (yours, [])):
        write = Step("consume", "s", writes=(region,))
        second = [by_hand(0, 2, FORK, JOIN), by_hand(1, 2, FORK, write, JOIN, x=Life.CALL)]
        assert kinds_of([first, second], halves=[0, 0]) == expected


def test_within_a_call_the_workspace_races_unit_by_unit():
    """In one call, writes to different units of the workspace do not race."""
    beside = [replace(WRITE, stream=stream, after=after) for stream, after in (("s", ()), ("t", (0,)))]
    join = replace(JOIN, after=(2,))
    assert kinds_of(one_rank(FORK, *beside, join, x=Life.CALL)) == ["data race"]
    beside[1] = replace(beside[1], writes=(Region("x", 0, 1, 2),))
    assert kinds_of(one_rank(FORK, *beside, join, x=Life.CALL)) == []


READY = [Step("signal", "s", peers=(1,), channel=0), Step("wait", "s", peers=(0,), channel=0)]
FREE = [Step("wait", "s", peers=(1,), channel=1), Step("signal", "s", peers=(0,), channel=1)]
IDLE = by_hand(1, 2, FORK, JOIN)


def races(calls):
    """Return the (kind of step, call) of both steps of each race, if all calls use the same half."""
    problems = verify(calls, halves=[0] * len(calls)).problems
    assert {problem.kind for problem in problems} <= {"data race"}
    return [tuple((at.step.kind, at.call) for at in problem.steps) for problem in problems]


def test_a_stream_whose_last_access_may_come_after_the_write_races_though_its_first_is_ordered():
    """Rank 1 signals after its first read, and then reads once more. The next call may overwrite the memory before."""
    pull, again = (Step(kind, "s", reads=(X,)) for kind in ("pull", "consume"))

    def calls(*reads):
        first = [
            by_hand(0, 2, FORK, WRITE, READY[0], FREE[0], JOIN, x=Life.CALL),
            by_hand(1, 2, FORK, READY[1], *reads, JOIN, x=Life.CALL),
        ]
        return [first, [by_hand(0, 2, FORK, Step("publish", "s", writes=(X,)), JOIN, x=Life.CALL), IDLE]]

    assert races(calls(pull, FREE[1], again)) == [(("consume", 0), ("publish", 1))]
    assert races(calls(pull, again, FREE[1])) == []


def test_a_streams_first_write_must_be_ordered_even_if_its_last_is():
    first = [
        by_hand(0, 2, FORK, WRITE, READY[0], JOIN, x=Life.CALL),
        by_hand(1, 2, FORK, READY[1], READ, JOIN, x=Life.CALL),
    ]
    publish, produce = (Step(kind, "s", writes=(X,)) for kind in ("publish", "produce"))

    def second(*steps):
        return [by_hand(0, 2, FORK, *steps, JOIN, x=Life.CALL), by_hand(1, 2, FORK, FREE[1], JOIN)]

    assert races([first, second(publish, FREE[0], produce)]) == [(("consume", 0), ("publish", 1))]
    assert races([first, second(FREE[0], publish, produce)]) == []


def test_every_earlier_call_counts_and_not_only_the_last_one():
    first = [
        by_hand(0, 2, FORK, WRITE, READY[0], JOIN, x=Life.CALL),
        by_hand(1, 2, FORK, READY[1], READ, JOIN, x=Life.CALL),
    ]
    later = [by_hand(0, 2, FORK, Step("publish", "s", writes=(X,)), JOIN, x=Life.CALL), IDLE]
    assert races([first, later, later]) == [(("consume", 0), ("publish", 1)), (("consume", 0), ("publish", 2))]


def test_steps_behind_a_deadlock_never_run_so_they_do_not_race():
    writer = by_hand(0, 2, FORK, WRITE, JOIN, x=Life.CALL)
    stuck = by_hand(1, 2, FORK, READY[1], READ, JOIN, x=Life.CALL)
    assert kinds_of([[writer, stuck], [writer, IDLE]], halves=[0, 0]) == ["deadlock"]


def test_what_an_earlier_call_wrote_twice_is_not_written_twice_in_this_one():
    result = Step("join", "s", reads=(X,))
    assert kinds_of(one_rank(FORK, WRITE, WRITE, JOIN) + one_rank(FORK, result)) == []
    assert kinds_of(one_rank(FORK, WRITE, WRITE, result)) == ["written twice"]


def test_a_half_must_be_named_for_every_call():
    with pytest.raises(ValueError, match="halves names 1 halves for 2 calls"):
        verify(one_rank(FORK, JOIN) * 2, halves=[0])


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            Plan("a", 0, 1, (FORK, WRITE, JOIN)),
            "x@0[0] is in a buffer that the plan does not declare: it declares none",
        ),
        (Plan("a", 0, 1, (FORK, WRITE, JOIN), {"y": Life.CALL}), "it declares y"),
    ],
)
def test_a_region_in_a_buffer_that_is_not_declared_is_malformed(plan, said):
    (problem,) = verify([[plan]]).problems
    assert problem.kind == "malformed"
    assert said in str(problem)


@pytest.mark.parametrize("end", [FORK, JOIN])
def test_a_plan_has_one_fork_and_one_join(end):
    (problem,) = verify(one_rank(FORK, end, JOIN)).problems
    assert problem.kind == "malformed"
    assert "the plan must run from one fork to one join on its stream" in str(problem)


@pytest.mark.parametrize("life", list(Life))
def test_scratch_is_a_ranks_own(life):
    """A scratch buffer may be used only by the rank that owns it."""
    pull = Step("pull", "s", reads=(Region("x", 1, 0, 1),))
    fill = Step("fork", "s", writes=(Region("x", 1, 0, 1),))
    calls = [[by_hand(0, 2, FORK, pull, JOIN, x=life), by_hand(1, 2, fill, JOIN, x=life)]]
    malformed = [str(problem) for problem in verify(calls).problems if problem.kind == "malformed"]
    assert len(malformed) == (life is Life.SCRATCH)
    assert all("x@1[0] is scratch memory, which only rank 1 itself can touch" in text for text in malformed)


def test_ranks_agree_on_how_long_a_buffer_lives():
    calls = [[by_hand(rank, 2, FORK, JOIN) for rank in range(2)]]
    calls[0] = [
        replace(plan, buffers={"x": life}) for plan, life in zip(calls[0], (Life.CALL, Life.OUTPUT), strict=True)
    ]
    (problem,) = verify(calls).problems
    assert problem.kind == "malformed"
    assert "buffer 'x' is Life.OUTPUT on rank 1 and Life.CALL on a lower rank" in problem.text


def test_a_peer_reads_an_input_before_its_owner_joins():
    """After the join, the caller may overwrite its input. Even in the last of all calls, so one call is enough."""

    def calls(*after):
        owner = [Step("fork", "s", writes=(X,)), READY[0], *(FREE[:1] if after else ()), JOIN]
        reader = [FORK, READY[1], READ, *after, JOIN]
        return [[by_hand(rank, 2, *steps, x=Life.INPUT) for rank, steps in enumerate((owner, reader))]]

    (problem,) = verify(calls()).problems
    assert problem.kind == "after the call"
    assert [(at.rank, at.step.kind) for at in problem.steps] == [(1, "consume"), (0, "join")]
    assert kinds_of(calls(FREE[1])) == []


def test_a_peer_writes_an_output_between_its_owners_fork_and_join():
    """Before the fork, the caller may still use the memory of its output."""

    def calls(*before):
        owner = [FORK, *(READY[:1] if before else ()), FREE[0], Step("join", "s", reads=(X,))]
        writer = [FORK, *before, WRITE, FREE[1], JOIN]
        return [[by_hand(rank, 2, *steps, x=Life.OUTPUT) for rank, steps in enumerate((owner, writer))]]

    (problem,) = verify(calls()).problems
    assert problem.kind == "before the call"
    assert [(at.rank, at.step.kind) for at in problem.steps] == [(0, "fork"), (1, "consume")]
    assert kinds_of(calls(READY[1])) == []


def test_what_a_peer_writes_but_the_join_does_not_read_is_written_before_the_join():
    owner = by_hand(0, 2, FORK, READY[0], JOIN, x=Life.OUTPUT)
    writer = by_hand(1, 2, FORK, READY[1], WRITE, JOIN, x=Life.OUTPUT)
    assert kinds_of([[owner, writer]]) == ["after the call", "write beyond an output"]
