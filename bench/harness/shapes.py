"""The shapes that are commonly compared, and the parser of ``--shapes``.

A shape is written M,N,K: the gathered rows, and the local columns and local contraction size of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Gathered rows, local columns, local contraction size. `ops`: short names of the ops the shape is meant for."""

    m: int
    n: int
    k: int
    ops: tuple[str, ...] = ("ag", "rs", "ar")
    label: str = ""


# (M per rank, K, N): two processes with one thread each finish these in milliseconds.
_CPU = ((1024, 4096, 256), (1024, 4096, 2048), (64, 4096, 4096), (16, 1024, 1024), (512, 1024, 1024))

# (label, op, N, K) of one rank at tensor parallelism 8, as in the models' tables of layers.
_LLAMA = (
    ("Llama-3 8B qkv", "ag", 768, 4096),
    ("Llama-3 8B gate+up", "ag", 3584, 4096),
    ("Llama-3 8B o", "rs", 4096, 512),
    ("Llama-3 8B down", "rs", 4096, 1792),
    ("Llama-3 70B qkv", "ag", 1280, 8192),
    ("Llama-3 70B gate+up", "ag", 7168, 8192),
    ("Llama-3 70B o", "rs", 8192, 1024),
    ("Llama-3 70B down", "rs", 8192, 3584),
    ("Llama-3.1 405B qkv", "ag", 2304, 16384),
    ("Llama-3.1 405B gate+up", "ag", 13312, 16384),
    ("Llama-3.1 405B o", "rs", 16384, 2048),
    ("Llama-3.1 405B down", "rs", 16384, 6656),
)
_GPT3 = (
    ("GPT-3 175B qkv", "ag", 4608, 12288),
    ("GPT-3 175B fc1", "ag", 6144, 12288),
    ("GPT-3 175B o", "rs", 12288, 1536),
    ("GPT-3 175B fc2", "rs", 12288, 6144),
)
SETS = ("cpu", "llama", "gpt3", "small", "decode", "ragged")


def named(name: str, world: int) -> list[Shape]:
    """Return the shapes of one set: ``cpu``, ``llama``, ``gpt3``, ``small`` (few rows), ``decode`` (matmul-all-reduce
    with one row for each of a few sequences) or ``ragged`` (rows that do not divide evenly).
    """
    if name == "cpu":
        return [Shape(rows * world, n, k, ("ag", "rs", "ar")) for rows, k, n in _CPU]
    if name == "llama":
        return _layers(_LLAMA, 8192)
    if name == "gpt3":
        return _layers(_GPT3, 8192)
    if name == "small":
        return [shape for m in (64, 256, 512, 1024) for shape in _layers(_LLAMA[:8], m)]
    if name == "decode":
        reduced = [layer for layer in _LLAMA[:8] if layer[1] == "rs"]
        return [Shape(m, n, k, ("ar",), label) for m in (world, 64) for label, _, n, k in reduced]
    if name == "ragged":
        return _layers(_LLAMA[4:8], 4091 * world)
    raise ValueError(f"shape set is {name!r}; give one of {', '.join(SETS)}, or M,N,K with M the gathered rows")


def parse(texts: list[str], world: int) -> list[Shape]:
    """Return the shapes for set names and M,N,K triples, in the given order."""
    shapes: list[Shape] = []
    for text in texts:
        if "," not in text:
            shapes += named(text, world)
            continue
        parts = text.split(",")
        if len(parts) != 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
            raise ValueError(f"shape is {text!r}; give M,N,K as three positive integers, e.g. 2048,256,4096")
        m, n, k = (int(part) for part in parts)
        if m % world:
            raise ValueError(f"shape is {text!r}: its {m} gathered rows cannot be split over {world} ranks")
        shapes.append(Shape(m, n, k))
    return shapes


def _layers(table: tuple[tuple[str, str, int, int], ...], m: int) -> list[Shape]:
    return [Shape(m, n, k, (op, "ar") if op == "rs" else (op,), label) for label, op, n, k in table]
