"""Times of calls on 8 H100 that others have published, beside those that the cost model predicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.harness import shapes
from bench.predict import predictions, rows_of, table_line
from symm_overlap.runtime import Device


class Published(NamedTuple):
    """A call on 8 H100, and the time that its authors published for one way to do it, in milliseconds."""

    op: str
    m: int
    n: int
    k: int
    way: str
    time: float
    source: str  # a key of `SOURCES`; after a comma, which of that source's ways


SOURCES = {
    "torch": "https://github.com/pytorch/pytorch/pull/143160",
    "Triton recipes": "https://github.com/yifuwang/symm-mem-recipes",
    "kraken": "https://github.com/meta-pytorch/kraken/pull/19",
    "ParallelKittens": "https://arxiv.org/abs/2511.13940",
    "FlashOverlap": "https://arxiv.org/abs/2504.19519",
    "CUTLASS distributed GEMM": "https://blog.shi-labs.com/distributed-gemm-88be6a481e2b",
}
"""The places where others published times."""

_AG, _RS = "all_gather_matmul", "matmul_reduce_scatter"
PUBLISHED = (
    Published(_AG, 2048, 3584, 8192, "plain", 0.301, "torch, NCCL and cuBLAS"),
    Published(_AG, 2048, 3584, 8192, "torch's", 0.354, "torch, decomposed"),
    Published(_AG, 2048, 3584, 8192, "fused", 0.295, "torch, native"),
    Published(_AG, 16384, 3584, 8192, "matmul alone", 1.672, "Triton recipes"),
    Published(_AG, 16384, 3584, 8192, "plain", 2.541, "Triton recipes"),
    Published(_AG, 16384, 3584, 8192, "fused", 1.846, "Triton recipes"),
    Published(_RS, 512, 4096, 14336, "plain", 0.134, "kraken"),
    Published(_RS, 512, 4096, 14336, "torch's", 0.614, "kraken"),
    Published(_RS, 512, 4096, 14336, "fused", 0.308, "kraken, Triton and copy engine"),
    Published(_RS, 2048, 4096, 14336, "plain", 0.423, "kraken"),
    Published(_RS, 2048, 4096, 14336, "torch's", 0.755, "kraken"),
    Published(_RS, 2048, 4096, 14336, "fused", 0.410, "kraken, Triton and copy engine"),
)


def published_lines() -> list[str]:
    """Return lines that compare the times that others measured on 8 H100 with the model's predictions."""
    widths = (22, 18, 46, 10, 10, 8)
    lines = [table_line(widths, ("op", "M, N, K", "what, and who published it", "published", "predicted", "ratio"))]
    for each in PUBLISHED:
        row = predictions(each.op, each.m, each.n, each.k, Device("H100"), 8)
        ways = {"plain": row.plain.total, "torch's": row.torchs.total, "fused": row.fused.total}
        ours = {**ways, "matmul alone": row.plain.matmul}[each.way]
        size, where = f"{each.m}, {each.n}, {each.k}", f"{each.way}: {each.source}"
        numbers = f"{each.time:.3f}", f"{ours:.3f}", f"{ours / each.time:.2f}"
        lines.append(table_line(widths, (each.op, size, where, *numbers)))
    return lines


def range_lines() -> list[str]:
    """Return lines that compare published ranges with the model's predictions for the layers of Llama and GPT-3."""
    found = list(rows_of(Device("H100"), 8, shapes.parse(["llama", "gpt3"], 8)))
    gains = [row.gains for _, _, row in found]
    wide = [row for shape, _, row in found if shape.label.endswith(("gate+up", "down"))]
    of_matmul = [(row.plain.matmul / row.ours.total, row.plain.matmul / row.fused.total) for row in wide]
    widths = (48, 34, 16, 16)
    return [
        table_line(widths, ("over 16 layers, 8 H100", "published", "predicted, ours", "predicted, fused")),
        table_line(widths, ("times as fast as plain", "1.06-1.68 ParallelKittens", _range(gains, 0), _range(gains, 2))),
        table_line(widths, ("", "up to 1.65 FlashOverlap", "", "")),
        table_line(
            widths,
            (
                "matmul alone, as a part of it, gate+up and down",
                "0.85-0.99 CUTLASS distributed GEMM",
                _range(of_matmul, 0),
                _range(of_matmul, 1),
            ),
        ),
    ]


def source_lines() -> list[str]:
    """Return lines with the places where the times were published."""
    return [table_line((26, 60), each) for each in (("published by", "at"), *SOURCES.items())]


def _range(values: Sequence[Sequence[float]], at: int) -> str:
    column = [each[at] for each in values]
    return f"{min(column):.2f}-{max(column):.2f}"
