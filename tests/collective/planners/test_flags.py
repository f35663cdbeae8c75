"""Plans of kernels whose flags or tiles do not fit one launch are rejected: when they run, the kernel would wait for a
flag that is never set, or copies and the kernel would wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from symm_overlap.collective.planners import (
    ALL_GATHER_MATMUL,
    MATMUL_REDUCE_SCATTER,
    fused_all_gather_matmul,
    fused_matmul_reduce_scatter,
)
from symm_overlap.plan import Plan, Step, plan_calls, verify

from .cases import contracts_of


@dataclass(eq=False)
class Node:
    """A step of a plan that is changed, with the nodes that its ``after`` names."""

    step: Step
    after: list[Node]


class Steps(list[Node]):
    """The steps of a plan, to be changed."""

    def of(self, kind: str, chunk: tuple[int, int] | None = None) -> Node:
        """Return the first step of a kind, and of a chunk if one is given."""
        return next(node for node in self if node.step.kind == kind and chunk in (None, node.step.chunk))

    def move(self, node: Node, behind: Node) -> None:
        self.remove(node)
        self.insert(self.index(behind) + 1, node)


def edited(plan: Plan, change: Callable[[Steps], None]) -> Plan:
    nodes = Steps()
    for step in plan.steps:
        nodes.append(Node(step, [nodes[earlier] for earlier in step.after]))
    change(nodes)
    steps = [replace(node.step, after=tuple(sorted(nodes.index(each) for each in node.after))) for node in nodes]
    return Plan(plan.op, plan.rank, plan.world, tuple(steps), plan.buffers)


def no_step_sets_the_flag(steps: Steps) -> None:
    flag, tiles = steps.of("raise", (1, 0)), steps.of("tiles", (1, 0))
    steps.remove(flag)
    tiles.after = [steps.of("pull", (1, 0))]


def the_flag_is_of_no_chunk_of_the_kernel(steps: Steps) -> None:
    poll, tiles, push = steps.of("poll", (1, 0)), steps.of("tiles", (1, 0)), steps.of("push", (1, 0))
    poll.step, poll.after = replace(poll.step, chunk=(1, 7)), [steps[0]]
    push.after.append(tiles)


def a_poll_by_an_event(steps: Steps) -> None:
    steps.of("poll", (1, 0)).after = [steps[0]]
    steps.of("push", (1, 0)).after.append(steps.of("tiles", (1, 0)))


def a_copy_waits_for_some_tiles(steps: Steps) -> None:
    """As an event it comes after the whole kernel, which waits for the copy."""
    first = steps.of("tiles", (0, 0))
    pulls = [node for node in steps if node.step.kind == "pull"]
    last = [node for node in steps if node.step.kind == "wait"][-1]
    steps.move(first, steps[steps.index(last) - 1])
    pulls[-1].after.append(first)


def tiles_wait_for_an_event(steps: Steps) -> None:
    tiles = steps.of("tiles", (2, 0))
    tiles.after.append(steps.of("pull", (1, 0)))


def a_step_is_between_the_tiles(steps: Steps) -> None:
    sleep = Node(Step("sleep", "compute0"), [])
    steps.insert(steps.index(steps.of("tiles", (0, 0))) + 1, sleep)


def a_stream_has_some_of_the_tiles(steps: Steps) -> None:
    tiles = steps.of("tiles", (0, 0))
    tiles.step, tiles.after = replace(tiles.step, stream="copy"), []
    steps[-1].after.append(tiles)


def a_kernel_that_gathers_sets_a_flag(steps: Steps) -> None:
    tiles = steps.of("tiles", (0, 0))
    steps.insert(-1, Node(Step("poll", "copy", chunk=(0, 0)), [tiles]))
    steps[-1].after.append(steps[-2])


def a_kernel_that_reduces_waits_for_a_flag(steps: Steps) -> None:
    tiles = steps.of("tiles")
    flag = Node(Step("raise", "copy", chunk=tiles.step.chunk), [steps[0]])
    steps.insert(1, flag)
    tiles.after = [flag]


def tiles_of_this_rank_wait(steps: Steps) -> None:
    tiles = steps.of("tiles", (0, 0))
    flag = Node(Step("raise", "copy", chunk=(0, 0)), [])
    steps.insert(steps.index(steps.of("wait")), flag)
    flag.after, tiles.after = [steps[0]], [flag]


def tiles_of_no_chunk(steps: Steps) -> None:
    tiles = steps.of("tiles", (0, 0))
    tiles.step = replace(tiles.step, chunk=None)


WRONG = [
    (no_step_sets_the_flag, "it waits for the flag of its chunk, but comes after no step that sets it"),
    (the_flag_is_of_no_chunk_of_the_kernel, "it waits for the flag of its chunk, but comes after no step that sets it"),
    (a_poll_by_an_event, "it waits for the flag of its chunk, but comes after no step that sets it"),
    (a_copy_waits_for_some_tiles, "so it comes after the whole kernel: let it poll the flag of a chunk instead"),
    (tiles_wait_for_an_event, "so only the first of them can come after pull chunk 1.0"),
    (a_step_is_between_the_tiles, "so nothing can be between them on their stream"),
    (a_stream_has_some_of_the_tiles, "so a stream that has some of the tiles can have no other step"),
    (a_kernel_that_gathers_sets_a_flag, "it waits for a flag, but a kernel that gathers sets none"),
    (a_kernel_that_reduces_waits_for_a_flag, "its kernel does not wait for the flag of raise chunk 1.0"),
    (tiles_of_this_rank_wait, "its kernel does not wait for the flag of raise chunk 0.0"),
    (tiles_of_no_chunk, "it names no chunk, but every flag is that of a chunk"),
]
OF_A_REDUCTION = (the_flag_is_of_no_chunk_of_the_kernel, a_poll_by_an_event, a_kernel_that_reduces_waits_for_a_flag)


@pytest.mark.parametrize(("change", "text"), WRONG)
def test_what_does_not_fit_one_launch_is_found_though_no_accesses_race(
    change: Callable[[Steps], None], text: str
) -> None:
    planner = fused_matmul_reduce_scatter if change in OF_A_REDUCTION else fused_all_gather_matmul
    calls = [[edited(plans[0], change), *plans[1:]] for plans in plan_calls(planner, 3, 2)]
    assert verify(calls, graphs=True).ok
    (problem, *_) = verify(calls, contracts=contracts_of(calls)).problems
    assert text in str(problem)


def test_the_first_tiles_may_come_after_an_event() -> None:
    """It is an event ahead of the whole kernel."""

    def change(steps: Steps) -> None:
        tiles, sleep = steps.of("tiles"), Node(Step("sleep", "copy"), [steps[0]])
        steps.insert(steps.index(tiles), sleep)
        tiles.after.append(sleep)

    calls = [[edited(plans[0], change), *plans[1:]] for plans in plan_calls(fused_matmul_reduce_scatter, 3, 2)]
    verify(calls, contracts=contracts_of(calls)).raise_for_problems()


def test_what_is_found_for_one_contract_does_not_hold_for_another() -> None:
    """Planners return the same plan again, and a plan keeps what was found. No other test has these plans."""
    calls = plan_calls(fused_matmul_reduce_scatter, 3, 2, copy="copy of this test")
    assert not verify(calls, contracts=[ALL_GATHER_MATMUL] * 2).ok
    verify(calls, contracts=[MATMUL_REDUCE_SCATTER] * 2).raise_for_problems()
