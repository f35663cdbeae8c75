"""Plans on real CUDA streams are forked from the caller's stream, joined to it, and capturable."""

import pytest
import torch

from symm_overlap.plan import Life, Plan, Step, execute
from symm_overlap.plan.builder import Builder
from symm_overlap.runtime.cuda.streams import CudaStreams
from tests.gpu.lanes import Lanes

pytestmark = pytest.mark.gpu

CYCLES = 5_000_000  # a few milliseconds, far longer than it takes to enqueue a step


def relay() -> Plan:
    """input -> compute1 -> copy -> caller, where each stream waits for the previous one by an event."""
    lives = {"input": Life.INPUT, "a": Life.SCRATCH, "b": Life.SCRATCH, "output": Life.OUTPUT}
    plan = Builder("relay", 0, 1, stream="caller", buffers=lives, inputs={"input": 1})
    first = plan.add("produce", "second", reads=[plan.here("input", 0)], writes=[plan.here("a", 0)])
    second = plan.add("pull", "copy", reads=[plan.here("a", 0)], writes=[plan.here("b", 0)], after=[first])
    plan.add("consume", "caller", reads=[plan.here("b", 0)], writes=[plan.here("output", 0)], after=[second])
    return plan.finish(plan.here("output", 0))


class Relay:
    """Runs the plan. Each stop sleeps and then adds 1. A stream that does not wait would overtake the sleep."""

    def __init__(self) -> None:
        self.lanes = Lanes(1)
        self.buffers = {name: torch.zeros(1024, device="cuda") for name in ("input", "a", "b", "output")}
        self.streams = CudaStreams(self.lanes.device)
        self.seen: dict[str, int] = {}
        stop = self.stop
        self.table = {"produce": stop, "pull": stop, "consume": stop}
        torch.cuda.synchronize()

    def stop(self, step: Step) -> None:
        self.seen[step.stream] = torch.cuda.current_stream().cuda_stream
        self.lanes[0].sleep(CYCLES)
        source, target = self.buffers[step.reads[0].buffer], self.buffers[step.writes[0].buffer]
        target.copy_(source)
        target.add_(1)

    def run(self) -> None:
        execute(relay(), self.table, self.streams)


def test_every_stream_waits_for_what_it_follows_and_the_caller_for_all() -> None:
    relays = Relay()
    results = torch.zeros(5, device="cuda")
    for call in range(5):
        relays.lanes[0].sleep(CYCLES)
        relays.buffers["input"].fill_(10 * call)
        relays.run()
        results[call].copy_(relays.buffers["output"][-1])
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert results.tolist() == [3, 13, 23, 33, 43]
    assert len(set(relays.seen.values())) == 3


def test_the_callers_stream_is_the_one_that_is_current() -> None:
    relays, mine = Relay(), torch.cuda.Stream()
    with torch.cuda.stream(mine):
        relays.run()
        assert torch.cuda.current_stream() == mine
    assert relays.seen["caller"] == mine.cuda_stream
    mine.synchronize()
    assert relays.buffers["output"].unique().tolist() == [3]


def test_a_captured_plan_replays() -> None:
    relays = Relay()
    relays.run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        relays.run()
    for replay in range(3):
        relays.buffers["input"].fill_(100 * replay)
        graph.replay()
        assert relays.buffers["output"].unique().tolist() == [100 * replay + 3]


def test_after_an_error_nothing_runs_behind_the_callers_back() -> None:
    relays = Relay()

    def fail(step: Step) -> None:
        raise MemoryError("no room")

    relays.table["consume"] = fail
    with pytest.raises(MemoryError, match="no room"):
        relays.run()
    torch.cuda.current_stream().synchronize()
    assert relays.buffers["b"].unique().tolist() == [2]  # the caller's stream has waited for the side streams


def test_streams_of_two_lanes_are_different_streams() -> None:
    # More streams than torch's pool contains. With pooled streams, some would be the same.
    handles = []
    for _ in range(40):
        relays = Relay()
        relays.run()
        handles += [relays.seen["second"], relays.seen["copy"]]
    torch.cuda.synchronize()
    assert len(set(handles)) == 80
