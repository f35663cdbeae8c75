"""Kinds of steps that free memory, and collectives, which move data when all ranks have reached them."""

from __future__ import annotations

from symm_overlap.plan import Builder, Kind, Life, Plan, register, simulate, verify

GATHER = register(Kind("test_gather", "copy engine", "meet", "#010203", meets="everyone")).name
WORK = register(Kind("test_work", "SMs", "compute", "#040506")).name
FREE = register(Kind("test_free", "", "order", "#070809", frees=True)).name

COSTS = {GATHER: 2.0, WORK: 3.0}


def plan(rank: int, works: int, kinds: tuple[str, ...] = (WORK,)) -> Plan:
    """Return a plan with ``works`` steps of work, a gather, and then a step of each of ``kinds`` on gathered memory."""
    builder = Builder("test", rank, 2, stream="main", buffers={"memory": Life.SCRATCH}, inputs={})
    for turn in range(works):
        builder.add(WORK, "main", writes=[builder.here("memory", 1 + turn)], chunk=(0, turn))
    memory = [builder.here("memory", 0)]
    builder.add(GATHER, "main", writes=memory, chunk=(0, 0), channel=0)
    for kind in kinds:
        reads, writes = ((), memory) if kind == FREE else (memory, ())
        builder.add(kind, "main", reads=reads, writes=writes, chunk=(1, 0))
    return builder.finish()


def test_a_collective_starts_when_all_ranks_have_come_and_counts_once() -> None:
    timeline = simulate([[plan(0, 1), plan(1, 2)]], lambda rank, step: (COSTS.get(step.kind, 0.0), 0.0))
    gathers = [event for event in timeline.events if event.at.step.kind == GATHER]
    assert [(event.start, event.end) for event in gathers] == [(6, 8), (6, 8)]
    assert sorted(event.waited for event in gathers) == [0, 3]
    assert timeline.makespan == 11
    assert (timeline.compute, timeline.communication) == (9, 2)
    assert timeline.busy[0, "main"] == 8


def problems(kinds: tuple[str, ...]) -> list[str]:
    return [problem.kind for problem in verify([[plan(rank, 1, kinds) for rank in range(2)]]).problems]


def test_what_was_freed_is_read_only_once_it_is_written_again() -> None:
    assert problems((WORK, FREE)) == []
    assert problems((FREE, WORK)) == ["use after free"] * 2
    assert problems((FREE, FREE)) == []
    builder = Builder("test", 0, 1, stream="main", buffers={"memory": Life.PERSISTENT}, inputs={})
    memory = [builder.here("memory", 0)]
    builder.add(WORK, "main", reads=memory)
    builder.add(FREE, "main", writes=memory)
    again = builder.finish()
    assert verify([[again]]).ok
    report = verify([[again], [again]])
    assert [problem.kind for problem in report.problems] == ["use after free"], "an earlier call has freed it"


def test_a_collective_writes_an_output_once() -> None:
    """It has two numbers, for arriving and for leaving, but these are one write."""

    def calls(gathers: int) -> list[list[Plan]]:
        plans = []
        for rank in range(2):
            builder = Builder("test", rank, 2, stream="main", buffers={"out": Life.OUTPUT}, inputs={})
            out = builder.here("out", 0)
            for _ in range(gathers):
                builder.add(GATHER, "main", writes=[out], channel=0)
            plans.append(builder.finish(out))
        return [plans, plans]

    assert verify(calls(1)).ok
    assert {problem.kind for problem in verify(calls(2)).problems} == {"written twice"}
