"""The cost model: how long a call would take on each path, given the costs of operations on the device.

For a pipelined call, its plan is run on a clock (`symm_overlap.plan.one_rank`) with the cost of every step. A fused
call is predicted in the same way: in its plan the kernel is one step for the rows of each chunk, which waits for the
chunk's flag or raises it. A sequential call is a chain on one stream: a collective, by the library or by kernels that
read the peers' memory, and one matmul. Times are in milliseconds.
"""

from __future__ import annotations

import torch

from ...kernels.configuration import programs
from ...plan import Plan, Step, kind
from ...plan.one_rank import Conditions, makespan_of_one_rank, times_of_one_rank
from ...runtime import Device, DeviceCosts
from ..planners import issued
from ..planners.kinds import CONSUME, POLL, PRODUCE, PUBLISH, RAISE, TILES
from ..problem import Problem
from .candidates import Candidate
from .choice import Choice, Prediction
from .plans import planned

ACTIVATIONS = 4096
"""The assumed number of rows of every rank if a weight travels. Ranks may then multiply the weight with different
numbers of rows, but all must choose alike. The number is an estimate."""

_MILLI = 1e3
_MOST_RANKS = 16  # whose times are predicted for one call
_PAUSE = 1e-7  # a hundred cycles or so


def predict(problem: Problem, costs: DeviceCosts, choice: Choice, *, in_order: bool = True) -> Prediction:
    """Predict the time of a call.

    Args:
        costs: the costs of operations on the device.
        choice: a sequential, a pipelined or a fused choice.
        in_order: whether sums that go through the vendor's library are added up in rank order; else the library adds
            up.
    """
    if choice.whole:
        reads_peers = choice.exchange == "planned" and not problem.op_kind.gathers
        moves = _in_kernels(problem, costs, choice) if reads_peers else _by_library(problem, costs, in_order)
        return _sequential(problem, costs, *moves)
    # All ranks have the same plan, except that each cuts matmuls of several parts at another place. Then the slowest
    # rank counts. Of many ranks only some are predicted, because the first call of every shape waits for this.
    ranks = range(0, problem.world, -(-problem.world // _MOST_RANKS)) if choice.span > 1 else (0,)
    of_ranks = [predict_plan(problem, costs, planned(problem, choice, rank), choice.candidate) for rank in ranks]
    return max(of_ranks, key=lambda each: each.total)


def predict_plain(problem: Problem, costs: DeviceCosts) -> Prediction:
    """Predict the time of the vendor's collective and one matmul, with sums in any order."""
    return _sequential(problem, costs, *_by_library(problem, costs, in_order=False))


def copy_streams(problem: Problem, costs: DeviceCosts | None) -> int:
    """Return the number of copy streams of a call in chunks. ``costs``: those of the device, if they are known.

    Measured on an H200 with an emulated link: with one stream, the wait for the next peer's signal left the link idle
    for 5 us after every copy, and with two for 2.5 us. With two streams, copies may overlap, so some chunks arrive
    later, and gathers whose matmuls take longer than their copies have to wait for these chunks. A sum needs all chunks
    in any case.
    """
    if not problem.op_kind.gathers:
        return 2
    if costs is None:
        return 1
    each = StepCosts(problem, costs, 1)
    # On one stream, there are a wait and perhaps a signal between copies, so the stream turns twice.
    link = (problem.world - 1) * (each.peer_copy + costs.wait + costs.signal + 2 * costs.turn)
    return 2 if link > problem.world * each.matmul else 1


def doubt_of_fused(problem: Problem, costs: DeviceCosts, device: Device) -> str:
    """Return why a prediction for the path ``fused`` does not count, or an empty string."""
    if not device.kernels:
        return "fused is not used: a rank cannot compile its kernels, because it has no Triton, or only interprets"
    measured = problem.factors in (torch.bfloat16, torch.float16) and problem.n % 16 == 0 == problem.k % 16
    if costs.fused_measured and measured:
        return ""
    return "fused is used only if it is forced or autotune has measured it: no such kernel was measured on this device"


def predict_plan(problem: Problem, costs: DeviceCosts, plan: Plan, candidate: Candidate) -> Prediction:
    """Predict the time of a call by ``plan``, which carries out ``candidate``."""
    steps = StepCosts(problem, costs, candidate.chunks, plan)
    spent = {"compute": 0.0, "copy": 0.0, "meet": 0.0, "order": 0.0}
    for step in plan.steps:
        record = kind(step.kind)
        role = "meet" if step.kind in (RAISE, POLL) else "copy" if record.overhead else record.role
        spent[role] += sum(steps(plan.rank, step))
    if not problem.op_kind.multiplies:  # "produce" steps only copy
        spent["copy"] += spent.pop("compute")
    total = makespan_of_one_rank(plan, steps, **_conditions(problem, plan, costs))
    host = sum(_host(problem, plan, costs))
    return Prediction(candidate, total, spent.get("compute", 0.0), spent["copy"], spent["meet"], host)


def predict_steps(problem: Problem, costs: DeviceCosts, plan: Plan, chunks: int) -> list[tuple[float, float]]:
    """Predict when each step of a plan begins and ends, in milliseconds after all ranks have begun the call."""
    steps = StepCosts(problem, costs, chunks, plan)
    times = times_of_one_rank(plan, steps, **_conditions(problem, plan, costs))
    return list(zip(times.starts, times.ends, strict=True))[: len(plan.steps)]


def _conditions(problem: Problem, plan: Plan, costs: DeviceCosts) -> Conditions:
    """Return the conditions under which the steps of a plan run; see `times_of_one_rank`."""
    return {"on_sms": on_sms(plan), "host": _host(problem, plan, costs), "flight": costs.flag * _MILLI}


def _host(problem: Problem, plan: Plan, costs: DeviceCosts) -> list[float]:
    """Return how long the host takes to issue each step, in milliseconds."""
    longer = costs.host_matmul - costs.host if problem.op_kind.multiplies else 0.0
    return [
        (count * costs.host + longer * (step.kind in (CONSUME, PRODUCE))) * _MILLI
        for step, count in zip(plan.steps, issued(plan), strict=True)
    ]


def on_sms(plan: Plan) -> frozenset[str]:
    """Return the kinds of steps of a plan that occupy the SMs: matmuls, sums, and copies within a GPU.

    Signals and barriers may be kernels too. They are so small that they start beside a matmul as soon as one of its
    tiles ends. If barriers had to wait for the matmul, sums by torch's plan, which has 16, would be predicted to take
    longer than an H200 took (`bench.model_error`).
    """
    return frozenset({PUBLISH, *(name for name in plan.kinds if kind(name).occupies == "SMs")})


def _last_tiles(plan: Plan) -> Step | None:
    return next((step for step in reversed(plan.steps) if step.kind == TILES), None)


def _turns(plan: Plan) -> frozenset[Step]:
    """Return the steps before or after which a copy stream turns between copies and waits; see `DeviceCosts.turn`."""
    kinds, found = on_sms(plan), set()
    computing = {step.stream for step in plan.steps if step.kind in kinds}
    last: dict[str, str] = {}
    for step in plan.steps:
        role = kind(step.kind).role
        if step.stream not in computing and last.get(step.stream) != role:
            found.add(step)
        last[step.stream] = role
    return frozenset(found)


class StepCosts:
    """The body and the tail of every step of a plan, in milliseconds: ``costs(rank, step)``, as `simulate` expects it.

    Args:
        chunks: number of chunks that each rank's part is cut into. If their sizes differ, the largest counts.
        plan: the plan that the steps belong to. Without it, the times of matmuls and copies are known.
    """

    def __init__(self, problem: Problem, costs: DeviceCosts, chunks: int, plan: Plan | None = None) -> None:
        m, n, k = _part(problem)
        self._costs, self._world = costs, problem.world
        self._chunks, self._nbytes = chunks, -(-problem.nbytes // chunks)
        dtype = problem.factors
        cut = -(-m // chunks), n, k
        if problem.op_kind.moves_weight and problem.op_kind.gathers:  # the weight's rows are the product's columns
            cut = m, -(-n // chunks), k
        self._last = None if plan is None else _last_tiles(plan)
        self._turning = frozenset() if plan is None else _turns(plan)
        # Of each rank's chunks, all but its own are copied: bytes are read for peers, and as many come from them.
        self._beside = 2 * self._nbytes * (problem.world - 1) / problem.world
        self._part = *cut, dtype
        self._matmul: tuple[float, float] | None = None
        if self._last is not None:
            held, parts = costs.sms - programs(costs.sms), problem.world * chunks
            late, share, beside = problem.op_kind.gathers, costs.fused, self._beside
            self._matmul = costs.matmul(*cut, dtype, held, parts=parts, late=late, share=share, beside=beside)
        elif problem.op_kind.multiplies:
            self._matmul = self._matmul_of(1)

    @property
    def matmul(self) -> float:
        """Seconds of the matmul of one chunk, beside other work that fills its last wave."""
        return self._matmul[0] if self._matmul else 0.0

    def _matmul_of(self, count: int) -> tuple[float, float]:
        """Return the body and the tail of one matmul of ``count`` chunks."""
        (m, n, k, dtype), costs = self._part, self._costs
        # What a series of matmuls loses is assumed to be the same at each of them, whatever its size.
        parts = count / self._chunks
        share = parts / (parts - 1 + 1 / costs.pieces)
        held = costs.held if self._world > 1 else 0
        return costs.matmul(count * m, n, k, dtype, held, share=share, beside=count * self._beside)

    @property
    def peer_copy(self) -> float:
        """Seconds of the copy of one chunk."""
        return self._costs.peer_copy(self._nbytes)

    def __call__(self, rank: int, step: Step) -> tuple[float, float]:
        """Return the body and the tail of a step of ``rank``."""
        body, tail = self._seconds(rank, step)
        if step.after and step.kind not in (TILES, POLL):  # TILES and POLL follow flags, not events
            tail += self._costs.event
        if step in self._turning:
            tail += self._costs.turn
        return body * _MILLI, tail * _MILLI

    def _seconds(self, rank: int, step: Step) -> tuple[float, float]:
        costs, record = self._costs, kind(step.kind)
        if step.kind in (CONSUME, PRODUCE) and self._matmul is not None:
            count = max(region.stop - region.start for region in step.writes)
            return self._matmul if count == 1 else self._matmul_of(count)
        if step.kind == TILES and self._matmul is not None:
            body, tail = self._matmul
            return body, tail if step is self._last else 0.0
        if step.kind == RAISE:
            return 0.0, costs.signal
        if step.kind == POLL:
            return 0.0, costs.signal + costs.flag
        if record.overhead:
            return costs.memory_kernel((len(step.reads) + len(step.writes)) * self._nbytes)
        if record.role == "copy" and {step.reads[0].rank, step.writes[0].rank} != {rank}:
            return costs.peer_copy(self._nbytes), 0.0
        if record.role in ("copy", "compute"):
            return costs.memory_kernel(2 * self._nbytes)
        if record.role == "meet":
            # While a signal travels, its stream goes on. The time of a barrier also includes that of its own signals.
            if record.meets == "awaits":
                return 0.0, costs.wait
            return 0.0, costs.signal + (costs.flag if record.meets == "everyone" else 0.0)
        return (_PAUSE if step.kind == "sleep" else 0.0), 0.0


def _part(problem: Problem) -> tuple[int, int, int]:
    """Return the size (m, n, k) of the matmul of one rank's part: (m, k) @ (k, n)."""
    op_kind, world = problem.op_kind, problem.world
    if op_kind.moves_weight:
        width = -(-problem.n // world) if problem.last else problem.n
        return (ACTIVATIONS, problem.rows, width) if op_kind.gathers else (problem.rows, width, ACTIVATIONS)
    if not problem.last:
        return problem.rows, problem.n, problem.k
    if op_kind.gathers:
        return problem.m, problem.n, -(-problem.k // world)
    return problem.m, -(-problem.n // world), problem.k


def _sequential(problem: Problem, costs: DeviceCosts, moves: float, operations: int) -> Prediction:
    """Predict a collective followed by one matmul. ``moves`` is the time of the collective in seconds."""
    op_kind, matmul = problem.op_kind, 0.0
    if op_kind.multiplies:
        m, n, k = problem.m, problem.n, problem.k
        if op_kind.moves_weight:
            m, n, k = (ACTIVATIONS, problem.m, problem.n) if op_kind.gathers else (problem.m, problem.n, ACTIVATIONS)
        matmul = sum(costs.matmul(m, n, k, problem.factors))
        operations += 1
    host = operations * costs.host + (costs.host_matmul - costs.host if op_kind.multiplies else 0.0)
    first = costs.host_matmul if op_kind.multiplies and not op_kind.gathers else costs.host
    total = first + moves + matmul
    return Prediction(Candidate("sequential"), *(seconds * _MILLI for seconds in (total, matmul, moves, 0.0, host)))


def _by_library(problem: Problem, costs: DeviceCosts, in_order: bool) -> tuple[float, int]:
    """Return the time in seconds, and the number of operations, of the exchange `c10d` with everything in one part."""
    op_kind, world = problem.op_kind, problem.world
    received = (world - 1) * problem.share
    moves, operations = costs.collective(received * (2 if op_kind.replicates and not in_order else 1)), 1
    if op_kind.gathers and problem.last:  # a copy puts the blocks of columns in order
        moves += sum(costs.memory_kernel(2 * world * problem.share))
        operations += 1
    if not op_kind.gathers and in_order:
        moves += sum(costs.memory_kernel((world + 1) * problem.share))
        operations += 1
    if op_kind.replicates and in_order:
        moves += costs.collective(received)
        operations += 1
    return moves, operations


def _in_kernels(problem: Problem, costs: DeviceCosts, choice: Choice) -> tuple[float, int]:
    """Return the time in seconds, and the number of operations, of a sum by a kernel that reads the peers' memory.

    A large all-reduce needs another such kernel.
    """
    world, launches = problem.world, 2 if problem.op_kind.replicates and not choice.one_shot else 1
    received = (world - 1) * problem.share * (world if choice.one_shot else 1)
    moves = launches * costs.meeting(received)
    if not problem.op_kind.multiplies:  # the input is copied to memory that peers can read
        moves += sum(costs.memory_kernel(2 * world * problem.share))
    return moves, launches + (not problem.op_kind.multiplies)
