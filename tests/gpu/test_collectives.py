"""The ops between processes on GPUs: values, back-to-back calls, graphs, lanes, and a rank that does not come.

Inputs are small integers, whose sums every dtype here holds exactly: outputs are compared bit by bit.
"""

import time

import pytest
import torch
import torch.distributed as dist

import symm_overlap
from symm_overlap.plan import Plan, Step, Table
from symm_overlap.settings import transformed
from tests.gpu.conftest import Worlds
from tests.ranks import Rank

pytestmark = pytest.mark.gpu

WORLDS = [2, 3, 4]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def integers(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


def all_shards(world: int, *shape: int, call: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What every rank passes in a call: each can make all of them."""
    return [integers(*shape, seed=1000 * call + rank, dtype=dtype) for rank in range(world)]


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


def gathers(me: Rank, dtype: torch.dtype, chunks: int, streams: int, gather_dim: int) -> None:
    with symm_overlap.force_path("pipelined", chunks=chunks, streams=streams):
        for call, (m, k, n) in enumerate([(64, 32, 48), (33, 16, 8), (256, 128, 64), (64, 32, 48), (2, 8, 8)]):
            shards = all_shards(me.world, 2, m, k, call=call, dtype=dtype)
            whole = torch.cat(shards, gather_dim)
            Bs = [integers(whole.shape[-1], width, seed=call + width, dtype=dtype) for width in (n, 2 * n)]
            A, products = symm_overlap.all_gather_matmul(
                shards[me.rank].to(me.device),
                [B.to(me.device) for B in Bs],
                gather_dim,
                me.group,
                return_A=call % 2 == 0,
            )
            assert (A is not None) == (call % 2 == 0)
            if A is not None:
                agree(A, whole)
            for product, B in zip(products, Bs, strict=True):
                agree(product, whole @ B)
    torch.cuda.synchronize()
    symm_overlap.raise_failures()


@pytest.mark.parametrize(("chunks", "streams"), [(1, 1), (1, 2), (2, 2), (3, 2)])
@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_matmul(gpu_ranks: Worlds, world: int, chunks: int, streams: int) -> None:
    for dtype in DTYPES:
        for gather_dim in (0, 1, 2):
            gpu_ranks.run(world, gathers, dtype, chunks, streams, gather_dim)


def scatters(me: Rank, dtype: torch.dtype, chunks: int, streams: int, scatter_dim: int) -> None:
    with symm_overlap.force_path("pipelined", chunks=chunks, streams=streams):
        for call, (m, k, n) in enumerate([(12, 32, 24), (36, 16, 12), (120, 64, 48), (12, 32, 24)]):
            As = all_shards(me.world, 12, m, k, call=call, dtype=dtype)
            Bs = all_shards(me.world, k, n, call=call + 50, dtype=dtype)
            total = torch.stack([A @ B for A, B in zip(As, Bs, strict=True)]).sum(0)
            A, B = As[me.rank].to(me.device), Bs[me.rank].to(me.device)
            part = symm_overlap.matmul_reduce_scatter(A, B, "sum", scatter_dim, me.group)
            agree(part, total.chunk(me.world, scatter_dim)[me.rank])
            agree(symm_overlap.matmul_all_reduce(A, B, "sum", me.group), total)
            mean = (total.double() / me.world).to(dtype)
            agree(symm_overlap.matmul_all_reduce(A, B, "avg", me.group), mean)
    torch.cuda.synchronize()
    symm_overlap.raise_failures()


@pytest.mark.parametrize(("chunks", "streams"), [(1, 1), (1, 2), (2, 2), (3, 2)])
@pytest.mark.parametrize("world", WORLDS)
def test_matmul_reduce_scatter_and_all_reduce(gpu_ranks: Worlds, world: int, chunks: int, streams: int) -> None:
    for dtype in (torch.float32, torch.float64):
        for scatter_dim in (0, 1, 2):
            gpu_ranks.run(world, scatters, dtype, chunks, streams, scatter_dim)


def mixes(me: Rank, calls: int) -> None:
    """Ops back to back on one workspace, inputs overwritten at once, outputs looked at only at the end."""
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


@pytest.mark.parametrize("world", WORLDS)
def test_calls_back_to_back_do_not_disturb_each_other(gpu_ranks: Worlds, world: int) -> None:
    gpu_ranks.run(world, mixes, 50, timeout=120)


def overlaps(me: Rank, calls: int) -> None:
    """Two lanes on two streams, issued in a different order on odd ranks."""
    inputs = [all_shards(me.world, 64, 32, call=lane, dtype=torch.float32) for lane in range(2)]
    B = integers(32, 16, seed=1, dtype=torch.float32).to(me.device)
    mine = [shards[me.rank].to(me.device) for shards in inputs]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def issue(lane: int) -> torch.Tensor:
        with symm_overlap.lane(10 + lane), torch.cuda.stream(streams[lane]):
            return symm_overlap.all_gather_matmul(mine[lane], [B], 0, me.group, return_A=False)[1][0]

    with symm_overlap.force_path("pipelined", chunks=2, streams=2):
        for lane in range(2):  # workspaces are made, and kernels loaded, in one order
            issue(lane)
        torch.cuda.synchronize()
        for _ in range(calls):
            order = [0, 1] if me.rank % 2 == 0 else [1, 0]
            outputs = {lane: issue(lane) for lane in order}
            torch.cuda.synchronize()
            for lane, output in outputs.items():
                agree(output, torch.cat(inputs[lane]) @ B.cpu())
    symm_overlap.raise_failures()


@pytest.mark.parametrize("world", [2, 4])
def test_lanes_may_be_used_in_a_different_order_on_different_ranks(gpu_ranks: Worlds, world: int) -> None:
    gpu_ranks.run(world, overlaps, 10, timeout=120)


def replays(me: Rank, calls: int, rounds: int) -> None:
    """A graph of so many calls, between and after others: captured twice, and not replayed at first."""
    A, B = torch.zeros(64, 32, device=me.device), integers(32, 16, seed=1, dtype=torch.float32).to(me.device)

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
            shards = all_shards(me.world, 64, 32, call=number, dtype=torch.float32)
            A.copy_(shards[me.rank])
            agree_with(step(), shards)
            graph, captured = capture()
            agree_with(step(), shards)
            for _ in range(3):  # back to back, in the same half of the workspace
                graph.replay()
            after = step() if number % 2 else []  # and calls that are not captured in between
            agree_with(captured, shards)
            agree_with(after or captured, shards)
        unused[0].replay()
    torch.cuda.synchronize()
    agree_with(unused[1], shards)
    symm_overlap.raise_failures()


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_a_captured_call_can_be_replayed_at_any_time(gpu_ranks: Worlds, world: int, calls: int) -> None:
    gpu_ranks.run(world, replays, calls, 5, timeout=120)


def comes_late(me: Rank) -> str:
    A, B = torch.ones(64, 32, device=me.device), torch.ones(32, 16, device=me.device)

    def call() -> torch.Tensor:
        with symm_overlap.force_path("pipelined", chunks=1, streams=2):
            return symm_overlap.all_gather_matmul(A, [B], 0, me.group, return_A=False)[1][0]

    with symm_overlap.lane(30):
        agree(call(), torch.full((64 * me.world, 16), 32.0))
        dist.barrier(me.group)
        if me.rank == me.world - 1:
            time.sleep(2.0)
        with symm_overlap.timeout(0.5):
            output = call()
        torch.cuda.synchronize()
        assert output.isnan().all()
        with pytest.raises(dist.DistBackendError) as error:
            symm_overlap.raise_failures()
        symm_overlap.raise_failures()  # said once; but the lane is of no use any more
        with pytest.raises((dist.DistBackendError, RuntimeError)):
            call()
    agree(A @ B, torch.full((64, 16), 32.0))
    agree(call(), torch.full((64 * me.world, 16), 32.0))  # on another lane all goes on
    symm_overlap.raise_failures()
    return str(error.value)


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_comes_late_is_named_and_nobody_gets_a_wrong_result(gpu_ranks: Worlds, world: int) -> None:
    said = gpu_ranks.run(world, comes_late)
    late = world - 1
    assert any(f"no signal from rank {late} on channel 0" in text for text in said[:late])
    assert "gave up on this lane" in said[late]
    for rank, text in enumerate(said):
        assert f"lane 30), rank {rank} of {world}" in text
        assert "all_gather_matmul" in text


def host_fails(me: Rank) -> str:
    """The last rank finds no memory for its product, in the middle of a call; no deadline is near."""
    A, B = torch.ones(64, 32, device=me.device), torch.ones(32, 16, device=me.device)
    last = me.world - 1

    def call() -> torch.Tensor:
        with symm_overlap.force_path("pipelined", chunks=1, streams=2):
            return symm_overlap.matmul_reduce_scatter(A, B, "sum", 0, me.group)

    def no_room(plan: Plan, table: Table) -> Table:
        def fail(step: Step) -> None:
            raise MemoryError("no room")

        return {**table, "produce": fail}

    with symm_overlap.lane(31):
        call()
        torch.cuda.synchronize()
        dist.barrier(me.group)
        start = time.monotonic()
        if me.rank == last:
            with transformed(no_room), pytest.raises(MemoryError, match="no room"):
                call()
        else:
            output = call()
        torch.cuda.synchronize()
        assert time.monotonic() - start < 20
        assert me.rank == last or output.isnan().all()
        with pytest.raises(dist.DistBackendError) as error:
            symm_overlap.raise_failures()
    agree(A @ B, torch.full((64, 16), 32.0))
    return str(error.value)


@pytest.mark.parametrize("world", [2, 3])
def test_an_error_on_a_host_ends_the_waits_of_its_peers_at_once(gpu_ranks: Worlds, world: int) -> None:
    *peers, own = gpu_ranks.run(world, host_fails)
    assert "an error on the host ended the call" in own
    for said in peers:
        assert f"rank {world - 1} gave up on this lane" in said
