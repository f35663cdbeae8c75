"""Draws programs of calls, with their inputs and expected results. Programs do not depend on the rank."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.collective.gradient_cases import (
    AllReduce,
    Case,
    GatherWeight,
    KeptScatter,
    PlainAllReduce,
    PlainGather,
    PlainScatter,
    Scatter,
    ScatterWeightGrad,
    Sizes,
    SumAllReduce,
)
from tests.gpu.conditions import Path
from tests.gpu.fuzz.cases import AllReduceNoBias, Gathers, Scaled, ScaledGather, ScaledScatter, Sums
from tests.gpu.test_shapes import STRIDES
from tests.gpu.test_values import LARGEST_WHOLE, plain, zeros_and_ones

ROWS = [0, 1, 2, 3, 5, 8, 17, 40]
INNER = [0, 1, 2, 7, 16, 33, 64]
LARGE = [(1, 2500), (3000, 2), (9000,)]  # with 64 columns, so that the workspace of a lane grows, also after graphs
COLUMNS = [0, 1, 3, 5, 16, 20, 48]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SYMMETRIC = "symmetric"  # instead of strides: a tensor of `symm_overlap.empty`, which peers read in place
LANES = [60, 61, 62, 63]
SETS = 3  # sets of numbers for each program


@dataclass(frozen=True)
class Call:
    """A call of an op.

    Attributes:
        dtype: the dtype of the inputs, unless the case defines it.
        strides: the kind of strides of each input, see `tests.gpu.test_shapes.strided`. "" means contiguous.
        path: the path that is forced, as by `on_path`.
        order: the order of sums, as in `symm_overlap.sum_order`.
        backward: whether the gradients of all inputs are computed, too.
    """

    case: Case
    dtype: torch.dtype
    strides: tuple[str, ...]
    path: Path
    order: str
    backward: bool

    def __str__(self) -> str:
        what = f"{self.case} {tuple(self.case.sizes)} {self.dtype} {self.path} order={self.order}"
        return f"{what} strides={self.strides}{' backward' if self.backward else ''}"


@dataclass(frozen=True)
class Program:
    """Calls, and the way in which they are run.

    Attributes:
        prepared: whether the program begins with `symm_overlap.prepare`. Otherwise it begins with an eager run.
        graph: whether the calls are also captured in a graph.
        aside: whether the calls run on a side stream.
        steps: pairs of a kind and a set of numbers. "earlier" replays an earlier program's graph. Other kinds are
            "eager" and "replay".
    """

    calls: tuple[Call, ...]
    lane: int
    prepared: bool
    graph: bool
    aside: bool
    steps: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        how = f"lane {self.lane}, {self.prepared=}, {self.graph=}, {self.aside=}, {self.steps=}".replace("self.", "")
        return "\n    ".join([how, *map(str, self.calls)])


def draw(seed: int, number: int, world: int) -> Program:
    """Draw a program. Equal arguments result in the same program."""
    chance = random.Random(f"{seed} {number} {world}")
    # Only calls of lane 0 use torch.distributed, and with gloo they cannot be captured.
    graph = chance.random() < 0.6
    lane = chance.choice(LANES if graph else [0, *LANES])
    calls = tuple(_call(chance, world, lane == 0) for _ in range(chance.randint(1, 4)))
    kinds = ["eager", "replay", "replay", "earlier"] if graph else ["eager", "eager", "earlier"]
    steps = tuple((chance.choice(kinds), chance.randrange(SETS)) for _ in range(6))
    return Program(calls, lane, chance.random() < 0.6, graph, chance.random() < 0.4, steps)


def _call(chance: random.Random, world: int, c10d: bool) -> Call:
    kind = chance.random()
    case = _scaled(chance) if kind < 0.15 else _large(chance) if kind < 0.2 else _case(chance, world)
    shapes = case.shapes(0, world)
    if isinstance(case, Scaled):  # only strides that GPUs support
        strides = (chance.choice(["", SYMMETRIC]), "transposed", "", "", "")
    else:
        strides = tuple(chance.choice(["", "", *STRIDES]) for _ in shapes)
        if isinstance(case, Gathers | PlainGather) and chance.random() < 0.15:
            strides = (SYMMETRIC, *strides[1:])
    backward = not isinstance(case, Scaled) and chance.random() < 0.4
    order = "any" if chance.random() < 0.15 else "rank"
    return Call(case, chance.choice(DTYPES), strides, _path(chance, c10d), order, backward)


def _path(chance: random.Random, c10d: bool) -> Path:
    """Draw a path. ``c10d``: whether a call may use torch.distributed."""
    chunks = chance.choice([1, 1, 2, 3, 7])
    paths: list[Path] = [
        ("fused", chunks, None),
        ("fused", chunks, None),
        ("pipelined", chunks, chance.choice([1, 2])),
        ("sequential", None, None),
        (None, None, None),
        *([("c10d", chance.choice([1, 2]), None)] * 2 if c10d else []),
    ]
    return chance.choice(paths)


def _lead(chance: random.Random) -> tuple[int, ...]:
    rows = chance.choice(ROWS)
    return chance.choice([(rows,), (rows,), (2, rows), (rows, 3), (1, rows)])


def _scaled(chance: random.Random) -> Case:
    """Draw a float8 case with sizes that GPUs support."""
    rows = chance.choice([row for row in ROWS if row])
    lead = chance.choice([(rows,), (rows,), (2, rows)])
    kind, by_row = chance.choice([ScaledGather, ScaledScatter]), chance.random() < 0.5
    dim = chance.randrange(len(lead) + (0 if by_row else 1))
    return kind(dim, Sizes(lead, chance.choice([16, 32, 64]), chance.choice([16, 32, 48])), by_row)


def _large(chance: random.Random) -> Case:
    """Draw a large case without a matmul, which would take too long on the host."""
    kind = chance.choice([PlainGather, PlainAllReduce, PlainScatter])
    return kind(0, "sum", Sizes(chance.choice(LARGE), 64, 0))


def _case(chance: random.Random, world: int) -> Case:
    lead, inner = _lead(chance), chance.choice(INNER)
    widths = tuple(chance.choice(COLUMNS) for _ in range(chance.choice([1, 1, 2, 3, 5])))
    sizes, dim = Sizes(lead, inner, widths[0]), chance.randrange(len(lead) + 1)
    reduce_op = chance.choice(["sum", "avg"]) if world in (1, 2, 4) else "sum"  # others would round averages
    pair = Sizes((chance.choice([1, 2]), chance.choice(ROWS)), inner, widths[0])
    keep = chance.choice([[], [0], [1, 0]])
    options = {"return_A": chance.random() < 0.5, "save": chance.choice([None, None, "shard", "gathered"])}
    return chance.choice(
        [
            lambda: Gathers(dim, sizes, widths, **options),
            lambda: Gathers(dim, sizes, widths, **options),
            lambda: Scatter(dim, reduce_op, sizes),
            lambda: Scatter(dim, reduce_op, sizes),
            lambda: KeptScatter(dim, reduce_op, sizes, keep=keep, keep_sum=not keep),
            lambda: Sums(dim, reduce_op, sizes),
            lambda: AllReduce(0, reduce_op, sizes),
            lambda: AllReduceNoBias(0, reduce_op, sizes),
            lambda: SumAllReduce(0, reduce_op, sizes),
            lambda: GatherWeight(dim % 2, "sum", pair, transpose=chance.random() < 0.5),
            lambda: ScatterWeightGrad(dim % 2, reduce_op, pair),
            lambda: PlainGather(dim, "sum", sizes),
            lambda: PlainAllReduce(0, reduce_op, sizes),
            lambda: PlainScatter(dim, reduce_op, sizes),
        ]
    )()


@dataclass(frozen=True)
class Numbers:
    """The numbers of a call on a rank, on the CPU and contiguous.

    Attributes:
        given: the inputs, followed by the gradients of the outputs if the call has a backward pass.
        expected: the expected results.
    """

    given: list[Tensor]
    expected: list[Tensor]


def numbers(call: Call, world: int, rank: int, seed: int) -> Numbers:
    """Draw zeros and ones. With more products in a sum there are fewer ones. The scales of float8 are one and two."""
    case, fixed = call.case, call.case.dtypes if isinstance(call.case, Scaled) else None
    shapes = [case.shapes(other, world) for other in range(world)]
    largest = max([1, *(size for shape in shapes[-1] for size in shape)]) * (4 if fixed else 1)

    def make(shape: tuple[int, ...], index: int, of: int) -> Tensor:
        dtype = fixed[index] if fixed else call.dtype
        made = zeros_and_ones(shape, torch.float32, 1000 * seed + 100 * of + index, largest)
        return (made + 1 if dtype == torch.float32 and fixed else made).to(dtype)

    inputs = [[make(shape, index, of) for index, shape in enumerate(shapes[of])] for of in range(world)]
    outputs = case.plain([[each.double() for each in of_rank] for of_rank in inputs])
    if not call.backward:
        weights, expected = [], outputs[rank]
    else:
        all_weights = [
            [make(tuple(x.shape), 50 + index, of) for index, x in enumerate(outputs[of])] for of in range(world)
        ]
        weights, expected = all_weights[rank], plain(case, inputs, all_weights, torch.float64, rank)
    # No number is negative, so intermediate sums are not larger than results. An average is a sum before the division.
    most = max([0.0, *(float(x.max()) for x in expected if x.numel())]) * (world if case.reduce_op == "avg" else 1)
    assert most <= LARGEST_WHOLE[torch.bfloat16 if fixed else call.dtype], f"{call}: {most} is not exact"
    return Numbers([*inputs[rank], *weights], expected)
