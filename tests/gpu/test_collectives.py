"""The ops between processes on GPUs: calls back to back, on several lanes, and in graphs.

Inputs are small integers. Every dtype here represents their sums exactly, so outputs are compared bit by bit.
"""

import pytest
import torch

import symm_overlap
from tests.gpu.conftest import WAITS, Worlds
from tests.ranks import Rank

pytestmark = pytest.mark.gpu

WORLDS = [2, 3, 4]
CYCLES = 5_000_000  # a few milliseconds, far longer than it takes to issue a call


def integers(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


def all_shards(world: int, *shape: int, call: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the inputs of all ranks in a call. Every rank can create all of them."""
    return [integers(*shape, seed=1000 * call + rank, dtype=dtype) for rank in range(world)]


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


def mixes(me: Rank, calls: int) -> None:
    """Ops back to back on one workspace. Inputs are overwritten at once, and outputs are checked only at the end."""
    A = torch.empty(64, 32, device=me.device)
    B = integers(32, 16, seed=1, dtype=torch.float32).to(me.device)
    inputs = [all_shards(me.world, 64, 32, call=call, dtype=torch.float32) for call in range(calls)]
    uploaded = [shards[me.rank].to(me.device) for shards in inputs]
    gathered, summed = [], []
    with symm_overlap.force_path("pipelined", chunks=2, streams=2):
        for call in range(calls):
            A.copy_(uploaded[call])
            gathered.append(symm_overlap.all_gather_matmul(A, [B], 0, me.group, return_A=False)[1][0])
            summed.append(symm_overlap.matmul_all_reduce(A, B, "sum", me.group))
            A.fill_(float("nan"))
    for call, shards in enumerate(inputs):
        agree(gathered[call], torch.cat(shards) @ B.cpu())
        agree(summed[call], sum(shards) @ B.cpu())
    symm_overlap.raise_failures()


@pytest.mark.gpu(cpu_too=True)
@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("world", WORLDS)
def test_calls_back_to_back_do_not_disturb_each_other(gpu_ranks: Worlds, world: int, waits: str) -> None:
    gpu_ranks.run(world, mixes, 50, waits=waits)


def overlaps(me: Rank, calls: int) -> None:
    """Two lanes on two streams, issued in a different order on odd ranks."""
    inputs = [all_shards(me.world, 64, 32, call=lane, dtype=torch.float32) for lane in range(2)]
    B = integers(32, 16, seed=1, dtype=torch.float32).to(me.device)
    mine = [shards[me.rank].to(me.device) for shards in inputs]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()  # the inputs must be written before another stream reads them

    def issue(lane: int) -> torch.Tensor:
        with symm_overlap.lane(10 + lane), torch.cuda.stream(streams[lane]):
            return symm_overlap.all_gather_matmul(mine[lane], [B], 0, me.group, return_A=False)[1][0]

    with symm_overlap.force_path("pipelined", chunks=2, streams=2):
        for lane in range(2):  # allocates workspaces and loads kernels in the same order on all ranks
            issue(lane)
        torch.cuda.synchronize()
        for _ in range(calls):
            order = [0, 1] if me.rank % 2 == 0 else [1, 0]
            outputs = {lane: issue(lane) for lane in order}
            torch.cuda.synchronize()
            for lane, output in outputs.items():
                agree(output, torch.cat(inputs[lane]) @ B.cpu())
    symm_overlap.raise_failures()


@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("world", [2, 4])
def test_lanes_may_be_used_in_a_different_order_on_different_ranks(gpu_ranks: Worlds, world: int, waits: str) -> None:
    gpu_ranks.run(world, overlaps, 10, waits=waits)


def takes_turns(me: Rank, calls: int) -> None:
    """Calls on one lane, each issued on another stream than the one before. Every other stream of rank 0 is late."""
    inputs = [all_shards(me.world, 64, 32, call=call, dtype=torch.float32) for call in range(calls)]
    B = integers(32, 16, seed=1, dtype=torch.float32).to(me.device)
    mine = [shards[me.rank].to(me.device) for shards in inputs]
    streams = [torch.cuda.Stream() for _ in range(2)]
    with symm_overlap.lane(30), symm_overlap.force_path("pipelined", chunks=2, streams=2):
        symm_overlap.all_gather_matmul(mine[0], [B], 0, me.group, return_A=False)
        torch.cuda.synchronize()  # the inputs must be written before another stream reads them
        outputs = []
        for call in range(calls):
            with torch.cuda.stream(streams[call % 2]):
                if me.rank == 0 and call % 2 == 0:
                    torch.cuda._sleep(CYCLES)
                outputs.append(symm_overlap.all_gather_matmul(mine[call], [B], 0, me.group, return_A=False)[1][0])
    torch.cuda.synchronize()
    for output, shards in zip(outputs, inputs, strict=True):
        agree(output, torch.cat(shards) @ B.cpu())
    symm_overlap.raise_failures()


@pytest.mark.parametrize("waits", WAITS)
def test_calls_of_a_lane_run_one_after_another_whatever_stream_they_are_issued_on(
    gpu_ranks: Worlds, waits: str
) -> None:
    gpu_ranks.run(2, takes_turns, 6, waits=waits)


def replays(me: Rank, calls: int, rounds: int) -> None:
    """Replay graphs of ``calls`` calls between other calls. One graph is captured first and replayed last."""
    A, B = torch.zeros(48, 32, device=me.device), integers(32, 16, seed=1, dtype=torch.float32).to(me.device)

    def step() -> list[torch.Tensor]:
        product = symm_overlap.all_gather_matmul(A, [B], 0, me.group, return_A=False)[1][0]
        return [product, *(symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group) for _ in range(calls - 1))]

    def capture() -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            return graph, step()

    def agree_with(outputs: list[torch.Tensor], shards: list[torch.Tensor]) -> None:
        agree(outputs[0], torch.cat(shards) @ B.cpu())
        for part in outputs[1:]:
            agree(part, (sum(shards) @ B.cpu()).chunk(me.world)[me.rank])

    with symm_overlap.lane(20 + calls), symm_overlap.force_path("pipelined", chunks=2, streams=2):
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        unused = capture()
        for number in range(rounds):
            shards = all_shards(me.world, 48, 32, call=number, dtype=torch.float32)
            A.copy_(shards[me.rank])
            agree_with(step(), shards)
            graph, captured = capture()
            agree_with(step(), shards)
            for _ in range(3):  # back to back, in the same half of the workspace
                graph.replay()
            after = step() if number % 2 else []  # calls between the replays that are not captured
            agree_with(captured, shards)
            agree_with(after or captured, shards)
        unused[0].replay()
    torch.cuda.synchronize()
    agree_with(unused[1], shards)
    symm_overlap.raise_failures()


@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_a_captured_call_can_be_replayed_at_any_time(gpu_ranks: Worlds, world: int, calls: int, waits: str) -> None:
    gpu_ranks.run(world, replays, calls, 5, waits=waits)
