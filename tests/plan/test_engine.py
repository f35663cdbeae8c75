"""The clock of all simulations: how it schedules work, and that its Python version gives the same bits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from symm_overlap.collective.planners import all_gather_consume, produce_all_reduce
from symm_overlap.plan import plan_calls, simulate, work
from symm_overlap.plan.work import Times, Work, doubles, integers, starts_of

from . import engine_twin


def made(streams: list[int], bodies: list[float], **given: Any) -> Work:
    """Return work made from lists. Fields that are not passed are empty, or -1 or 0 for each piece of work."""
    count = len(streams)
    lists = {name: given.get(name, [[] for _ in range(count)]) for name in ("after", "holds")}
    lots = given.get("lots", [])
    nothing = [-1] * count
    return Work(
        stream=integers(streams),
        after_starts=integers(starts_of(lists["after"])),
        after=integers(number for each in lists["after"] for number in each),
        holds_starts=integers(starts_of(lists["holds"])),
        holds=integers(resource for each in lists["holds"] for resource in each),
        body=doubles(bodies),
        tail=doubles(given.get("tail", [0.0] * count)),
        lottery=integers(given.get("lottery", nothing)),
        lot_starts=integers(starts_of(lots)),
        lots=doubles(lot for each in lots for lot in each),
        loads=integers(given.get("loads", nothing)),
        slowed=integers(given.get("slowed", nothing)),
        slow_down=doubles(given.get("slow_down", [])),
    )


def random_work(seed: int) -> Work:
    source = random.Random(seed)
    count, groups, lotteries = source.randint(0, 40), source.randint(0, 3), source.randint(0, 3)
    streams, resources = source.randint(1, 6), source.randint(2, 5)
    rings = source.random() < 0.1
    even = source.random() < 0.5  # many events at the same time

    def length() -> float:
        choices = [0.0, 0.0, 0.5, 1.0, 2.0] if even else [0.0, source.random(), 1e-9 * source.random()]
        return source.choice(choices)

    def some(limit: int, chance: float) -> int:
        return source.randrange(limit) if limit and source.random() < chance else -1

    slowed = [some(groups, 0.4) for _ in range(count)]
    return made(
        [source.randrange(streams) for _ in range(count)],
        [length() for _ in range(count)],
        after=[
            [source.randrange(count if rings else number) for _ in range(source.choice([0, 0, 1, 2]))] if number else []
            for number in range(count)
        ],
        holds=[source.sample(range(resources), source.choice([0, 1, 2])) if group < 0 else [] for group in slowed],
        tail=[length() if group < 0 else 0.0 for group in slowed],
        lottery=[some(lotteries, 0.6) for _ in range(count)],
        lots=[[source.random() for _ in range(count)] for _ in range(lotteries)],
        loads=[some(groups, 0.5) if group < 0 else -1 for group in slowed],
        slowed=slowed,
        slow_down=[source.choice([1.0, 1.1, 1.5, 2.0]) for _ in range(groups)],
    )


def same(compiled: Times, plain: Times) -> bool:
    return all(one.tolist() == other.tolist() for one, other in zip(compiled, plain, strict=True))


def test_the_twin_gives_the_same_bits() -> None:
    """The compiled clock and its Python version return the same bits for random work."""
    halted = slow = 0
    for seed in range(1500):
        given = random_work(seed)
        compiled = work.run(given)
        assert same(compiled, engine_twin.run(given)), seed
        halted += len(compiled.order) < len(given.stream)
        slow += any(
            compiled.ends[number] - compiled.starts[number] > given.body[number] + 1e-6
            for number in compiled.order
            if given.slowed[number] >= 0
        )
    assert halted > 50
    assert slow > 100


@pytest.mark.parametrize("planner", [all_gather_consume, produce_all_reduce])
def test_plans_take_the_same_times_on_both_clocks(planner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = plan_calls(planner, 4, 2, chunks=2)
    compiled = [simulate(calls, seed=seed).events for seed in range(3)]
    monkeypatch.setattr(work, "run", engine_twin.run)
    assert [simulate(calls, seed=seed).events for seed in range(3)] == compiled


def test_a_stream_runs_in_order_and_dependencies_hold() -> None:
    times = work.run(made([0, 0, 1], [1.0, 2.0, 4.0], after=[[], [], [0]]))
    assert times.starts.tolist() == [0.0, 1.0, 1.0]
    assert times.ends.tolist() == [1.0, 3.0, 5.0]
    assert times.causes.tolist() == [-1, 0, 0]
    assert times.order.tolist() == [0, 2, 1]  # dependents come before the next work of the stream


def test_a_resource_is_held_for_the_body_and_not_for_the_tail() -> None:
    times = work.run(made([0, 1], [1.0, 1.0], tail=[5.0, 0.0], holds=[[0], [0]]))
    assert times.starts.tolist() == [0.0, 1.0]
    assert times.ends.tolist() == [6.0, 2.0]
    assert times.causes.tolist() == [-1, 0]


def test_lots_decide_between_those_that_come_together() -> None:
    """If two pieces of work are ready for a resource at the same time, the lower lot goes first."""
    for lots, order in (([0.2, 0.1], [1, 0]), ([0.1, 0.2], [0, 1])):
        times = work.run(made([0, 1], [1.0, 1.0], holds=[[0], [0]], lottery=[0, 0], lots=[lots]))
        assert times.order.tolist() == order


def test_nothing_overtakes_older_work_on_the_same_first_resource() -> None:
    """Work that became ready earlier for the same first resource goes first, even if newer work could start."""
    # Work 1 waits for the link that work 0 holds. Work 2 waits behind work 1 for the same engine, although its own link
    # is free.
    holds = [[0, 2], [1, 2], [1, 3]]
    times = work.run(made([0, 1, 2], [3.0, 1.0, 1.0], holds=holds))
    assert times.starts.tolist() == [0.0, 3.0, 4.0]


def test_what_is_slowed_takes_longer_only_while_its_group_is_loaded() -> None:
    # The compute takes 4. From 1 to 3 there is communication, during which the compute runs at half speed.
    arguments: dict[str, Any] = {"slowed": [0, -1, -1], "loads": [-1, -1, 0], "slow_down": [2.0]}
    times = work.run(made([0, 1, 1], [4.0, 1.0, 2.0], **arguments))
    assert times.ends.tolist() == [5.0, 1.0, 3.0]
    # Communication before and after the compute does not slow it down.
    assert (
        work.run(made([0, 0, 0], [2.0, 4.0, 2.0], slowed=[-1, 0, -1], loads=[0, -1, 0], slow_down=[2.0])).ends[2] == 8
    )


def test_a_ring_and_what_never_comes_do_not_start() -> None:
    """Work that depends on itself in a ring, or on work that never comes (-1), does not start. Other work runs."""
    times = work.run(made([0, 1, 2, 3], [1.0] * 4, after=[[1], [0], [-1], []]))
    assert times.order.tolist() == [3]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"body": doubles([1.0])}, "an array does not have one entry for each piece of work"),
        ({"after_starts": integers([0, 1, 5])}, "after_starts does not fit after"),
        ({"after": integers([7])}, "work that does not exist"),
        ({"holds_starts": integers([0, 1, 0])}, "holds_starts does not fit holds"),
        ({"stream": integers([0, -1])}, "a stream must be a number of 0 or more"),
        ({"lottery": integers([0, 0])}, "there is no such lottery"),
        ({"loads": integers([0, 3])}, "there is no such group"),
        ({"slowed": integers([0, -1]), "tail": doubles([1.0, 0.0])}, "work that is slowed must hold no resource"),
        ({"lottery": integers([0, 0]), "lot_starts": integers([0, 1]), "lots": doubles([0.5]),
          "holds_starts": integers([0, 1, 2]), "holds": integers([0, 0])}, "a lottery has too few lots"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_each_other_are_refused(change: dict[str, Any], text: str) -> None:
    right = made([0, 1], [1.0, 1.0], after=[[], [0]], slow_down=[1.0])
    with pytest.raises(ValueError, match=text):
        work.run(right._replace(**change))
    with pytest.raises(TypeError, match="a contiguous buffer of 64-bit numbers was expected"):
        work.run(right._replace(body=memoryview(b"1")))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"body": doubles([float("nan"), 1.0])}, "a duration must be a number that is at least 0"),
        ({"body": doubles([1.0, -1.0])}, "a duration must be a number that is at least 0"),
        ({"tail": doubles([float("nan"), 1.0])}, "a duration must be a number that is at least 0"),
        ({"tail": doubles([float("inf"), 1.0])}, "the durations add up to more"),
        ({"body": doubles([1e308, 1e308])}, "the durations add up to more"),
        ({"body": doubles([1e308, 0.0]), "slow_down": doubles([2.0])}, "the durations add up to more"),
        ({"slow_down": doubles([0.5])}, "a slow-down must be finite and at least 1"),
        ({"slow_down": doubles([float("nan")])}, "a slow-down must be finite and at least 1"),
        ({"lot_starts": integers([0, 1]), "lots": doubles([float("nan")])}, "a lot must be finite"),
    ],
)
@pytest.mark.parametrize("run", [work.run, engine_twin.run])
def test_numbers_on_which_a_clock_never_ends_are_refused(run: Any, change: dict[str, Any], text: str) -> None:
    right = made([0, 1], [1.0, 1.0], slow_down=[1.0])
    assert run(right).ends.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=text):
        run(right._replace(**change))
