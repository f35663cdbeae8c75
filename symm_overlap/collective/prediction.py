"""The cost model: what a call would take on each path, by what its operations cost on the device.

The plan of a pipelined call is run on a clock (`symm_overlap.plan.alike`), with the cost of every step. A sequential
call is a chain on one stream: the library's collective and one matmul. Times are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable

from ..plan import Plan, Step, kind
from ..plan.alike import makespan_alike, operations
from ..runtime import DeviceCosts
from .choice import Choice, Prediction
from .planners import produce_all_reduce, produce_reduce_scatter
from .plans import gather_plan, reduction_plan
from .problem import Problem

ACTIVATIONS = 4096
"""Where a weight travels, ranks may have different numbers of rows to multiply it with, and all must choose alike: they
take this number for their own. It is an estimate."""

_MILLI = 1e3
_PAUSE = 1e-7  # a hundred cycles or so


def predict(problem: Problem, costs: DeviceCosts, candidate: Choice) -> Prediction:
    """What a call would take.

    Args:
        costs: of the device.
        candidate: a sequential or a pipelined choice.
    """
    if candidate.whole:
        return _sequential(problem, costs)
    return predict_plan(problem, costs, planned(problem, candidate), candidate.path, candidate.chunks)


def planned(problem: Problem, candidate: Choice) -> Plan:
    """The plan of rank 0 for a pipelined call that wants nothing but its result."""
    sort = problem.sort
    if sort.gathers:
        multiplies = sort.multiplies
        accumulate = multiplies and problem.last and not sort.any_rows
        return gather_plan(
            problem, candidate, 0, in_place=False, keep=not multiplies, consume=multiplies, accumulate=accumulate
        )
    planner: Callable[..., Plan] = produce_all_reduce if sort.replicates else produce_reduce_scatter
    return reduction_plan(planner, candidate, 0, problem.world, in_place=False)


def predict_plan(problem: Problem, costs: DeviceCosts, plan: Plan, path: str, chunks: int) -> Prediction:
    """What a call by ``plan`` would take, with ``chunks`` pieces of each rank's part."""
    steps = StepCosts(problem, costs, chunks)
    spent = {"compute": 0.0, "copy": 0.0, "meet": 0.0, "order": 0.0}
    for step in plan.steps:
        record = kind(step.kind)
        spent["copy" if record.overhead else record.role] += sum(steps(plan.rank, step))
    if not problem.sort.multiplies:  # what is "produced" is copied
        spent["copy"] += spent.pop("compute")
    total = makespan_alike(
        plan, steps, on_sms=on_sms(plan, costs), issue=costs.host * _MILLI, flight=costs.flag * _MILLI
    )
    host = sum(map(operations, plan.steps)) * costs.host * _MILLI
    return Prediction(path, chunks, total, spent.get("compute", 0.0), spent["copy"], spent["meet"], host)


def on_sms(plan: Plan, costs: DeviceCosts) -> frozenset[str]:
    """The kinds of steps of a plan that are kernels."""
    return costs.kernels | {name for name in plan.kinds if kind(name).occupies == "SMs"}


class StepCosts:
    """The body and the tail of every step of a plan, in milliseconds: ``costs(rank, step)``, as `simulate` wants it.

    Args:
        chunks: pieces that each rank's part is cut into; of ragged ones, the largest counts.
    """

    def __init__(self, problem: Problem, costs: DeviceCosts, chunks: int) -> None:
        m, n, k = _part(problem)
        self._costs, self._world = costs, problem.world
        self._nbytes = -(-problem.nbytes // chunks)
        dtype = problem.factors
        cut = -(-m // chunks), n, k
        if problem.sort.any_rows and problem.sort.gathers:  # the weight's rows are the product's columns
            cut = m, -(-n // chunks), k
        held = costs.held if problem.world > 1 else 0
        self._matmul = costs.matmul(*cut, dtype, held) if problem.sort.multiplies else None

    def __call__(self, rank: int, step: Step) -> tuple[float, float]:
        """The body and the tail of a step of ``rank``."""
        body, tail = self._seconds(rank, step)
        if step.after:
            tail += self._costs.event
        return body * _MILLI, tail * _MILLI

    def _seconds(self, rank: int, step: Step) -> tuple[float, float]:
        costs, record = self._costs, kind(step.kind)
        if step.kind in ("consume", "produce") and self._matmul is not None:
            return self._matmul
        if record.overhead:
            return costs.memory_kernel((len(step.reads) + len(step.writes)) * self._nbytes)
        if record.role == "copy" and step.reads[0].rank != rank:
            return costs.peer_copy(self._nbytes), 0.0
        if record.role in ("copy", "compute"):
            return costs.memory_kernel(2 * self._nbytes)
        if record.role == "meet":
            # A signal is under way while its stream goes on; the time of a barrier is also that of its own signals.
            seen = costs.flag if record.meets == "everyone" else 0.0
            return 0.0, costs.signal + seen
        return (_PAUSE if step.kind == "sleep" else 0.0), 0.0


def _part(problem: Problem) -> tuple[int, int, int]:
    """The matmul of one rank's part: (m, k) @ (k, n)."""
    sort, world = problem.sort, problem.world
    if sort.any_rows:
        width = -(-problem.n // world) if problem.last else problem.n
        return (ACTIVATIONS, problem.rows, width) if sort.gathers else (problem.rows, width, ACTIVATIONS)
    if not problem.last:
        return problem.rows, problem.n, problem.k
    if sort.gathers:
        return problem.m, problem.n, -(-problem.k // world)
    return problem.m, -(-problem.n // world), problem.k


def _sequential(problem: Problem, costs: DeviceCosts) -> Prediction:
    """The plain collective, and one matmul: the exchange `c10d` with one part that is everything."""
    sort, world = problem.sort, problem.world
    received = (world - 1) * problem.nbytes
    moves, operations = costs.collective(received), 1
    if sort.gathers and problem.last:  # blocks of columns are put in order
        moves += sum(costs.memory_kernel(2 * world * problem.nbytes))
        operations += 1
    if not sort.gathers:
        moves += sum(costs.memory_kernel((world + 1) * problem.nbytes))
        operations += 1
    if sort.replicates:
        moves += costs.collective(received)
        operations += 1
    matmul = 0.0
    if sort.multiplies:
        m, n, k = problem.m, problem.n, problem.k
        if sort.any_rows:
            m, n, k = (ACTIVATIONS, problem.m, problem.n) if sort.gathers else (problem.m, problem.n, ACTIVATIONS)
        matmul = sum(costs.matmul(m, n, k, problem.factors))
        operations += 1
    host = operations * costs.host
    total = costs.host + moves + matmul
    return Prediction("sequential", 1, *(seconds * _MILLI for seconds in (total, matmul, moves, 0.0, host)))
