"""A rank does not wait for a message if a peer can report why it will not come, and never longer than its deadline."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import symm_overlap
from symm_overlap.pipeline.runtime import c10d_transport
from symm_overlap.pipeline.runtime.wire import Wire
from tests.limits import SOON
from tests.pipeline.runtime.models import Layer, batch, squared
from tests.pipeline.runtime.test_contract import TRANSPORTS, runtime_of
from tests.ranks import Pool, Rank

DEADLINE = 15.0


def layers(me: Rank) -> list[nn.Module]:
    return [Layer(stage) for stage in range(me.world)]


def raises_here_alone(me: Rank, lane: int, what: str, transport: str, steps: int) -> None:
    with symm_overlap.lane(lane), symm_overlap.timeout(DEADLINE):
        runtime = runtime_of(me, "1F1B", 4, layers(me), loss=squared, transport=transport)
        x, target = batch(4)
        for _ in range(steps):
            runtime.step(x, target=target)
        began = time.monotonic()
        wrong = me.rank == 1
        disabled = torch.no_grad() if wrong and what == "no gradients" else contextlib.nullcontext()
        losses = () if wrong and what == "no list" else []
        expected = {"no list": TypeError, "no gradients": RuntimeError}[what] if wrong else dist.DistBackendError
        with pytest.raises(expected), disabled:
            runtime.step(x, target=target, losses=losses)  # type: ignore[arg-type]
        assert time.monotonic() - began < SOON
        dist.barrier(me.group)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("what", ["no list", "no gradients"])
@pytest.mark.parametrize("steps", [0, 2])
def test_what_one_rank_rejects_is_told_to_the_others(
    ranks: Pool, fresh_lane: Callable[[], int], what: str, transport: str, steps: int
) -> None:
    ranks.run(2, raises_here_alone, fresh_lane(), what, transport, steps)


def merges(me: Rank, lane: int, transport: str, steps: int) -> None:
    """The last rank cannot concatenate its results. No other rank can know that."""
    with symm_overlap.lane(lane), symm_overlap.timeout(DEADLINE):
        whole = layers(me)
        runtime = runtime_of(me, "1F1B", 4, whole, loss=squared, transport=transport)
        x, target = batch(4)
        for _ in range(steps):
            runtime.step(x, target=target)
        if me.rank == 1:
            shapes = iter([(3, 6), (3, 6), (3, 5), (3, 6)])
            whole[1].register_forward_hook(lambda *_: torch.zeros(next(shapes)).requires_grad_())
        began = time.monotonic()
        runtime._loss = _any_shape  # this loss accepts all shapes
        expected = RuntimeError if me.rank == 1 else dist.DistBackendError
        with pytest.raises(expected):
            _twice(lambda: runtime.step(x, target=target))  # through slots, rank 0 is notified in its next step
        assert time.monotonic() - began < SOON
        dist.barrier(me.group)


def _twice(step: Callable[[], object]) -> None:
    step()
    step()


def _any_shape(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return result.sum()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("steps", [0, 2])
def test_results_that_cannot_be_put_together_end_the_step_of_all(
    ranks: Pool, fresh_lane: Callable[[], int], transport: str, steps: int
) -> None:
    ranks.run(2, merges, fresh_lane(), transport, steps)


def again(me: Rank, lane: int) -> None:
    with symm_overlap.lane(lane), symm_overlap.timeout(DEADLINE):
        tied = [[(0, "linear.weight"), (1, "linear.weight")]]
        runtime = runtime_of(me, "1F1B", 4, layers(me), loss=squared, tied=tied, transport="symmetric")
        x, target = batch(4)
        runtime.step(x, target=target)
        for _ in range(2 - me.rank):  # rank 1 calls only one, so rank 0 must not wait in its second
            began = time.monotonic()
            with pytest.raises((RuntimeError, TypeError)):
                runtime.step(x, target=target, losses=() if me.rank else None)  # type: ignore[arg-type]
            assert time.monotonic() - began < SOON
        dist.barrier(me.group)


def test_a_step_on_a_lane_that_is_out_of_step_fails_at_once(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, again, fresh_lane())


def out_of_memory(me: Rank, lane: int) -> None:
    with symm_overlap.lane(lane), symm_overlap.timeout(DEADLINE):
        runtime = runtime_of(me, "1F1B", 4, layers(me), loss=squared, transport="c10d")
        x, target = batch(4)
        real, began = Wire.receive, time.monotonic()
        try:
            if me.rank == 1:
                Wire.receive = _no_room_once(real)  # type: ignore[method-assign]
            with pytest.raises((MemoryError, dist.DistBackendError)):
                runtime.step(x, target=target)
        finally:
            Wire.receive = real  # type: ignore[method-assign]
        assert time.monotonic() - began < SOON
        runtime.step(x, target=target)  # no message of the failed step may be in flight


def _no_room_once(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    left = [1]

    def receive(self: Wire, nbytes: int, channel: tuple[int, int], *, read: bool = False) -> torch.Tensor:
        if nbytes != c10d_transport._HEADER and left:
            left.pop()
            raise MemoryError("planted")
        return real(self, nbytes, channel, read=read)

    return receive


def test_a_rank_without_memory_for_a_message_takes_it_all_the_same(ranks: Pool, fresh_lane: Callable[[], int]) -> None:
    ranks.run(2, out_of_memory, fresh_lane())


def late(me: Rank, lane: int) -> None:
    with symm_overlap.lane(lane):
        runtime = runtime_of(me, "1F1B", 4, layers(me), loss=squared, transport="c10d")
        x, target = batch(4)
        runtime.step(x, target=target)
        began = time.monotonic()
        if me.rank == 1:
            time.sleep(4)
        else:
            with symm_overlap.timeout(1), pytest.raises(dist.DistBackendError, match="rank 1"):
                runtime.step(x, target=target)
            assert time.monotonic() - began < 3


def test_a_deadline_that_is_set_later_holds(fresh_lane: Callable[[], int]) -> None:
    with Pool(2) as pool:
        pool.run(2, late, fresh_lane())


def kept(me: Rank, microbatches: int) -> int:
    most = 0
    real = Wire.begin

    def begin(self: Wire, to: tuple[int, int], *, in_turn: bool = True) -> None:
        nonlocal most
        real(self, to, in_turn=in_turn)
        most = max(most, sum(len(messages) for messages in self._sent.values()))

    Wire.begin = begin  # type: ignore[method-assign]
    try:
        runtime = runtime_of(me, "1F1B", microbatches, layers(me), loss=squared, transport="c10d")
        x, target = batch(microbatches)
        runtime.step(x, target=target)
    finally:
        Wire.begin = real  # type: ignore[method-assign]
    return most


def test_messages_are_kept_no_longer_than_their_receivers_may_need(ranks: Pool) -> None:
    few, many = (ranks.run(2, kept, microbatches) for microbatches in (8, 48))
    assert few == many
