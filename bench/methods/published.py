"""The plans that torch publishes for its ops, run by the executor of this package, so that only the plan differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from torch import Tensor

import symm_overlap
from bench.harness.case import Case
from bench.harness.launch import Rank
from bench.methods.method import Method, Prepared, single
from symm_overlap.collective.exchange import Call, Peers
from symm_overlap.collective.exchange.planned.gather import Gather
from symm_overlap.collective.exchange.planned.reduction import ScatterReduction
from symm_overlap.collective.exchange.planned.run import Run
from symm_overlap.collective.exchange.ranges import name_of_range
from symm_overlap.collective.layouts import GatherLayout
from symm_overlap.collective.parts.products import Products
from symm_overlap.collective.parts.scattered import ScatteredProducts
from symm_overlap.collective.planners.published import torch_all_gather_matmul, torch_matmul_reduce_scatter
from symm_overlap.collective.problem import Problem, problem
from symm_overlap.plan import Life, Plan, Region
from symm_overlap.runtime import around
from symm_overlap.settings import current

LANE = 2
"""The lane of these calls. They are no calls of an op, and like torch's own calls they use other memory than ops."""


@cache
def torchs_plan(op: str, rank: int, world: int, order: str | None = "sleep") -> Plan:
    """Return torch's plan, with buffers in the halves of a lane's workspace.

    torch has one persistent buffer for all calls. With the two halves, that is not needed here.

    Args:
        order: see `torch_matmul_reduce_scatter`.
    """
    if op == "all_gather_matmul":
        plan = torch_all_gather_matmul(rank, world)
    else:
        plan = torch_matmul_reduce_scatter(rank, world, order=order)
    lives = {name: Life.CALL if life is Life.PERSISTENT else life for name, life in plan.buffers.items()}
    return replace(plan, buffers=lives)


class PublishedGather(Gather):
    """One call of an all-gather-matmul with torch's plan."""

    def plan_of(self, call: Call, keep: bool, consume: bool, accumulate: bool) -> Plan:
        """See `Gather.plan_of`."""
        return torchs_plan("all_gather_matmul", call.rank, call.world)


class PublishedScatter(ScatterReduction):
    """One call of a matmul-reduce-scatter with torch's plan."""

    def __init__(self, call: Call, producer: ScatteredProducts, output: Tensor, order: str | None) -> None:
        self.producer, self.output, self.average = producer, output, False
        rows, columns = output.shape
        self.chunks, self.cut = 1, (0, rows)
        self.stage = output.new_empty(call.world, rows, columns)
        plan = torchs_plan("matmul_reduce_scatter", call.rank, call.world, order)
        buffers = {f"pingpong{turn}": output.nbytes for turn in (0, 1)}
        Run.__init__(self, call, plan, [output], self._tensors(), producer.operands, **buffers)

    def view(self, region: Region) -> Tensor:
        """See `Run.view`."""
        if region.buffer.startswith("pingpong"):
            return self.shared(region, tuple(self.output.shape), self.output.dtype)
        return super().view(region)


def gather(group: str, described: Problem, a: Tensor, b: Tensor) -> Tensor:
    """Compute ``all_gather(a) @ b``."""
    call = Call(Peers(group, current()), described, a.device)
    layout = GatherLayout(a.shape, 0, call.world)
    product = call.backend.new_output(a, layout.total_rows, b.shape[1])
    run = PublishedGather(call, layout, a, Products(call.backend, layout, [b], [None], [product]), None)
    _run(call, run)
    return product


def scatter(group: str, described: Problem, a: Tensor, b: Tensor, order: str | None = "sleep") -> Tensor:
    """Compute ``reduce_scatter(a @ b)``."""
    call = Call(Peers(group, current()), described, a.device)
    output = call.backend.new_output(a, a.shape[0] // call.world, b.shape[1])
    producer = ScatteredProducts(call.backend, [a], [b], [None], None, 0, call.world)
    _run(call, PublishedScatter(call, producer, output, order))
    return output


def _run(call: Call, run: Run) -> None:
    with around(lambda: name_of_range(call.problem, call.choice, call.rank)):
        run.run()


def described_as(case: Case, device: str) -> Problem:
    """Return the problem of a case, which is the key under which its calls are cached."""
    return problem(case.op, case.m, case.n, case.k, case.dtype, case.world, device, arguments=("torch's plan",))


def published_call(rank: Rank, case: Case, a: Tensor, b: Tensor, lane: int) -> Prepared:
    """Prepare calls on their own lane, since they are no calls of an op."""
    described = described_as(case, rank.device.type)
    run: Callable[[str, Problem, Tensor, Tensor], Tensor] = gather if case.gathers else scatter

    @contextmanager
    def around() -> Iterator[None]:
        with symm_overlap.lane(lane), symm_overlap.force_path("pipelined", chunks=1, streams=2):
            yield

    return Prepared(lambda: run(rank.group_name, described, a, b), single, around=around)


METHODS = (
    Method(
        "published",
        "torch's published plan",
        lambda rank, case, a, b: published_call(rank, case, a, b, LANE),
        ops=("all_gather_matmul", "matmul_reduce_scatter"),
    ),
)
