"""The chooser's answers for many calls as one text, which is stored in ``chooser_table.txt`` beside this file.

    python -m tests.collective.chooser_table       # write the file again after an intended change

A change of the model, of a plan or of a threshold changes the file, so reviewers see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from bench.harness.case import OPS as SHORT
from bench.harness.shapes import parse
from symm_overlap.collective.choosing.candidates import Candidate
from symm_overlap.collective.choosing.choice import Choice
from symm_overlap.collective.choosing.chooser import choose
from symm_overlap.collective.problem import problem
from symm_overlap.runtime import Device
from symm_overlap.settings import Settings

FILE = Path(__file__).with_suffix(".txt")
H100 = Device("H100")
SIZES = (1 << 10, 1 << 13, 1 << 16)  # rows of 4096 columns


def text() -> str:
    """Return the whole table."""
    return "\n".join(lines()) + "\n"


def lines() -> Iterator[str]:
    """Yield a line for each call."""
    for shape in parse(["llama", "gpt3", "small", "ragged"], 8):
        for short in shape.ops:
            yield line(SHORT[short], shape.m, shape.n, shape.k, world=8)
    for name, waits, world in (
        ("H100", False, 8),
        ("H100", True, 2),
        ("H200", True, 8),
        ("A100", True, 8),
        ("B200", True, 8),
        ("H100", True, 72),
    ):
        for op, n, k in (("all_gather_matmul", 7168, 8192), ("matmul_reduce_scatter", 8192, 3584)):
            yield line(op, 8192, n, k, world=world, device=Device(name, waits))
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_gather_weight_matmul", "weight_grad_reduce_scatter"):
        for rows in SIZES:
            yield line(op, rows, 4096, 0, world=8)
    for op in ("reduce_scatter", "all_reduce", "matmul_reduce_scatter"):
        for rows in (64, 8192):
            yield line(op, rows, 4096, 512 * op.startswith("matmul"), world=8, order="any")
            yield line(op, rows, 4096, 512 * op.startswith("matmul"), world=8, lane=1)
    for numel in (1 << 13, 1 << 20, 1 << 25):  # a single row is divided among ranks too
        yield line("all_reduce", 1, numel, 0, world=8)
    for op in ("all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"):
        dtype = torch.float8_e4m3fn if "gather" in op else torch.bfloat16
        yield line(op, 8192, 4096, 4096, world=8, dtype=dtype)
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        yield line(op, 8192, 4096, 4096, world=8, last_dim=op != "matmul_all_reduce")
        yield line(op, 8192, 4096, 4096, world=8, dtype=torch.float32)
        yield line(op, 8192, 4096, 4096, world=16, direct=False)
        for rows in (255, 256):
            yield line(op, 2 * rows, 1024, 1024, world=2, kind="cpu", dtype=torch.float32)
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_gather_weight_matmul", "weight_grad_reduce_scatter"):
        for rows in (255, 256):
            yield line(op, 2 * rows, 1024, 0, world=2, kind="cpu", dtype=torch.float32)


def line(
    op: str,
    m: int,
    n: int,
    k: int,
    *,
    world: int,
    kind: str = "cuda",
    device: Device = H100,
    dtype: torch.dtype = torch.bfloat16,
    last_dim: bool = False,
    direct: bool = True,
    order: str = "rank",
    lane: int = 0,
) -> str:
    """Return the line of one call: its description, the path it uses, and the prediction for each candidate."""
    described = problem(op, m, n, k, dtype, world, kind, last_dim=last_dim)
    choice = choose(described, Settings(order=order, lane=lane), direct=direct, device=device)
    where = f"{world} {device if kind == 'cuda' else 'CPUs'}{'' if direct else ' on hosts'}"
    words = {" last dim": last_dim, " any order": order == "any", f" lane {lane}": lane > 0}
    size = f"{m}, {n}, {k}{''.join(word for word, said in words.items() if said)}"
    return f"{where:<20} {op:<28} {str(dtype).removeprefix('torch.'):<14} {size:<28} {taken(choice)}".rstrip()


def taken(choice: Choice) -> str:
    """Return the path, its chunks or its span, and the predictions in microseconds."""
    path = f"{choice.path}/{parts(choice.candidate)}" if not choice.whole else f"{choice.path} {choice.exchange}"
    if choice.one_shot:
        path += ", one shot"
    predicted = (f"{each.path[:3]}/{parts(each.candidate)} {each.total * 1e3:.0f}" for each in choice.predictions)
    return f"{path:<29} {'  '.join(predicted)}"


def parts(candidate: Candidate) -> str:
    """Return the number of chunks, or a span of 3 as ``x3``."""
    return f"x{candidate.span}" if candidate.span > 1 else f"{candidate.chunks}"


if __name__ == "__main__":
    FILE.write_text(text())
