"""Messages outside the schedule, over a library whose messages block: the first one to a rank, or every large one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from symm_overlap.pipeline.action import SEND_B
from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.runtime import Stage, wire
from symm_overlap.pipeline.runtime.c10d_transport import C10dTransport
from symm_overlap.pipeline.runtime.step_run import StepRun
from symm_overlap.pipeline.runtime.tied import TiedParameters
from symm_overlap.pipeline.runtime.wire import Channel, Wire
from symm_overlap.plan import Step
from symm_overlap.runtime import lane_group, message_group

Exchange = tuple[bool, int, int]
"""Whether a rank sends, its peer, and the channel."""
CPU = torch.device("cpu")


def left_waiting(rows: Mapping[int, Sequence[Exchange]]) -> dict[int, Exchange]:
    """Let every message block both ranks until the other one is there too. Return who waits forever, and for what."""
    at = dict.fromkeys(rows, 0)
    moved = True
    while moved:
        moved = False
        for rank, row in rows.items():
            if at[rank] < len(row):
                sends, peer, channel = row[at[rank]]
                others = rows[peer][at[peer] :]
                if sends and others and others[0] == (False, rank, channel):
                    at[rank], at[peer], moved = at[rank] + 1, at[peer] + 1, True
    return {rank: row[at[rank]] for rank, row in rows.items() if at[rank] < len(row)}


def as_exchanges(steps: Sequence[Step]) -> list[Exchange]:
    return [(step.kind == SEND_B, step.peer, step.channel or 0) for step in steps]


def without_a_wire(rank: int, world: int) -> C10dTransport:
    nothing: Any = None
    return C10dTransport(nothing, rank, world, CPU, 1)


def test_ranks_that_wait_in_a_circle_are_found() -> None:
    both_send = {0: [(True, 1, 0), (False, 1, 0)], 1: [(True, 0, 0), (False, 0, 0)]}
    assert left_waiting(both_send) == {0: (True, 1, 0), 1: (True, 0, 0)}
    assert not left_waiting({0: both_send[0], 1: both_send[1][::-1]})


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_confirmations_do_not_wait_in_a_circle(world: int) -> None:
    rows = {rank: as_exchanges(without_a_wire(rank, world).confirmations) for rank in range(world)}
    assert not left_waiting(rows)
    assert all(len(row) == 2 * (world - 1) for row in rows.values())


class Shared(nn.Module):
    """A stage with parameters that other stages have too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(2)) for _ in range(3))


TIES = [
    [[(0, "a"), (3, "a")]],
    [[(0, "a"), (1, "a"), (2, "a"), (3, "a")], [(1, "b"), (3, "b")], [(2, "c"), (0, "b")]],
    [[(3, "c"), (1, "a")], [(0, "c"), (1, "b"), (3, "a")]],
]


@pytest.mark.parametrize(("schedule", "ties"), [*(("1F1B", ties) for ties in TIES), ("DualPipe", [])])
def test_tied_parameters_do_not_wait_in_a_circle(schedule: str, ties: list[list[tuple[int, str]]]) -> None:
    made = generate(schedule, ranks=4, microbatches=8)
    tied = {
        rank: TiedParameters(made, {each: Stage(Shared(), each) for each in made.stages_of_ranks[rank]}, ties, rank)
        for rank in range(4)
    }
    for what in ("equalise", "reduce"):
        rows = {rank: as_exchanges(getattr(each, what)) for rank, each in tied.items()}
        assert not left_waiting(rows), what
        assert any(rows.values())


class Library:
    """Stands in for a library that enqueues messages. Records them, and the arguments of waits."""

    def __init__(self, patch: pytest.MonkeyPatch, enqueued: bool) -> None:
        self.exchanges: list[Exchange] = []
        self.waits: list[tuple[Any, ...]] = []
        patch.setattr(wire, "are_enqueued", lambda group, device: enqueued)
        patch.setattr(wire, "wire_device", lambda group, device: device)
        patch.setattr(dist, "isend", lambda tensor, *, group, group_dst, tag: self._noted(True, group_dst, tag))
        patch.setattr(dist, "irecv", lambda tensor, *, group, group_src, tag: self._noted(False, group_src, tag))

    def _noted(self, sends: bool, peer: int, tag: int) -> Any:
        self.exchanges.append((sends, peer, tag))
        return SimpleNamespace(wait=lambda *given: self.waits.append(given))

    def wire(self, most: Mapping[Channel, int] | None = None) -> Wire:
        group: Any = None
        return Wire(group, CPU, 7.0, most or {})


@pytest.mark.parametrize("world", [2, 3, 5])
def test_connections_do_not_wait_in_a_circle(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    rows = {}
    for rank in range(world):
        library = Library(monkeypatch, enqueued=True)
        library.wire().connect(rank, world)
        rows[rank] = library.exchanges
    assert not left_waiting(rows)
    assert all(len(row) == 2 * (world - 1) for row in rows.values())
    library = Library(monkeypatch, enqueued=False)
    library.wire().connect(0, world)
    assert not library.exchanges, "no message blocks a rank that does not enqueue messages"


def test_the_host_waits_only_for_what_it_reads_if_messages_are_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = (timedelta(seconds=7),)
    for enqueued, wanted in ((True, [deadline, (), ()]), (False, [deadline] * 3)):
        library = Library(monkeypatch, enqueued)
        made = library.wire()
        made.receive(4, (1, 0), read=True)
        made.receive(4, (1, 0))
        made.begin((1, 0))
        made.send(torch.zeros(4, dtype=torch.uint8), (1, 0))
        made.release()
        assert library.waits == wanted


def test_a_library_with_one_queue_a_rank_carries_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = SimpleNamespace(lane_groups={3: "the lane's own"})
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    for bound, wanted in ((None, False), (torch.device("cuda", 0), True)):
        group: Any = SimpleNamespace(bound_device_id=bound)
        found = message_group(state, group, 3, 1.0)
        assert (found == "the lane's own") == wanted
        assert (found is group) != wanted
    assert lane_group(state, group, 3, 1.0) == "the lane's own"


def test_only_what_a_device_can_fill_is_filled_after_a_failure() -> None:
    module = nn.Linear(4, 4)
    module.weight.grad, module.bias.grad = torch.ones(4, 4).t(), torch.ones(4).to_sparse()
    made = generate("1F1B", ranks=1, microbatches=1)
    nothing: Any = None
    run = StepRun(made, {0: Stage(module, 0)}, nothing, loss=None, scale=True, merge=None, backward=True, device=CPU)
    dense = [torch.ones(3), torch.ones(2, 3, 4).permute(2, 0, 1), torch.ones(()), torch.ones(0, 3)]
    others: list[Tensor] = [torch.ones(3, device="meta"), torch.ones(4, 4)[:, 1], torch.ones(1).expand(3)]
    run.result = [*dense, *others]
    assert [id(each) for each in run.written] == [id(each) for each in (*dense, module.weight.grad)]
