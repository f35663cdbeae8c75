"""One benchmark case: an op on one shape, its inputs on every rank, and the expected results.

Inputs are seeded by rank, so that any rank can create every rank's inputs and compute the reference without a
collective.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

OPS = {
    "ag": "all_gather_matmul",
    "rs": "matmul_reduce_scatter",
    "ar": "matmul_all_reduce",
}

# The largest n up to which every integer is exact in the dtype.
_EXACT_LIMIT = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}


@dataclass(frozen=True)
class Case:
    """`op` on gathered rows `m`, local columns `n`, local contraction size `k`, over `world` ranks.

    `transposed`: the weight is a view ``W.t()`` of a matrix (n, k), the format in which `torch.nn.Linear` stores it.
    """

    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    world: int
    label: str = ""
    transposed: bool = False

    def __post_init__(self) -> None:
        if self.op not in OPS.values():
            raise ValueError(f"op is {self.op!r}; give one of {', '.join(OPS.values())}")
        if min(self.m, self.n, self.k) < 1:
            raise ValueError(f"m, n, k are {self.m}, {self.n}, {self.k}; each must be 1 or more")
        if self.m % self.world:
            raise ValueError(f"m is {self.m}, which {self.world} ranks do not divide; m counts the gathered rows")

    @property
    def gathers(self) -> bool:
        return self.op == "all_gather_matmul"

    @property
    def rows(self) -> int:
        """Rows of one rank's shard."""
        return self.m // self.world

    @property
    def a_shape(self) -> tuple[int, int]:
        return (self.rows if self.gathers else self.m, self.k)

    @property
    def b_shape(self) -> tuple[int, int]:
        return (self.k, self.n)

    @property
    def out_shape(self) -> tuple[int, int]:
        return (self.rows if self.op == "matmul_reduce_scatter" else self.m, self.n)

    @property
    def gathered_bytes(self) -> int:
        """Size of the gathered input of an all-gather-matmul, in bytes."""
        return self.m * self.k * self.dtype.itemsize

    @property
    def terms(self) -> int:
        """Number of products that are summed in one element of the output."""
        return self.k if self.gathers else self.k * self.world

    def key(self) -> dict[str, object]:
        dtype = str(self.dtype).removeprefix("torch.")
        shape = {"op": self.op, "m": self.m, "n": self.n, "k": self.k, "dtype": dtype, "world": self.world}
        return {**shape, "transposed": self.transposed}

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        text = f"{self.op}  M {self.m} ({self.rows} a rank)  N {self.n}  K {self.k}  {dtype}  world {self.world}"
        text += "  W.t()" if self.transposed else ""
        return f"{text}  [{self.label}]" if self.label else text


def inputs(case: Case, rank: int, kind: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(A, B)`` of one rank: ``"normal"`` is N(0, 1), ``"binary"`` is 0/1 with sums that the dtype represents
    exactly.
    """
    generator = torch.Generator(device=device).manual_seed(1000 * rank + (0 if kind == "binary" else 1))
    if kind not in ("binary", "normal"):
        raise ValueError(f"kind is {kind!r}; give 'binary' or 'normal'")
    density = min(0.5, (_EXACT_LIMIT[case.dtype] / 8 / case.terms) ** 0.5)  # expected sums are an eighth of the limit

    def random(shape: tuple[int, int]) -> torch.Tensor:
        if kind == "normal":
            return torch.randn(shape, generator=generator, device=device).to(case.dtype)
        return (torch.rand(shape, generator=generator, device=device) < density).to(case.dtype)

    a, b = random(case.a_shape), random(case.b_shape)
    return a, b.t().contiguous().t() if case.transposed else b


def reference(case: Case, rank: int, kind: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the expected results of rank `rank` in float64: ``output`` and, for an all-gather-matmul, ``gathered``."""
    # Sums of 0/1 products stay far below 2**24, so float32 is exact for them and much quicker than float64.
    wide = torch.float32 if kind == "binary" and case.dtype != torch.float64 else torch.float64
    if case.gathers:
        gathered = torch.cat([inputs(case, source, kind, device)[0] for source in range(case.world)])
        b = inputs(case, rank, kind, device)[1]
        output = gathered.to(wide) @ b.to(wide)
        results = {"output": output.double(), "gathered": gathered.double()}
    else:
        mine = slice(rank * case.rows, (rank + 1) * case.rows) if case.op == "matmul_reduce_scatter" else slice(None)
        output = torch.zeros(case.out_shape, dtype=wide, device=device)
        for source in range(case.world):
            a, b = inputs(case, source, kind, device)
            output += a[mine].to(wide) @ b.to(wide)
        results = {"output": output.double()}
    if kind == "binary" and results["output"].max() > _EXACT_LIMIT[case.dtype]:
        raise ValueError(f"the 0/1 sums of {case} reach {results['output'].max():.0f}: not exact in {case.dtype}")
    return results
