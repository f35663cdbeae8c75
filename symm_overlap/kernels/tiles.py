"""Computing one tile of a product: multiply, scale, add a bias, round, store.

All of this also runs in Triton's interpreter. ``INTERPRETED`` works around the interpreter's gaps: its dot product
treats bfloat16 as integers and rounds 8-bit floats on the way. `rounding` implements the rounding that it lacks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import bound, ceil_div
from .rounding import rounded


@triton.jit
def weight_of(column, ns, COUNT: tl.constexpr, TILE_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the weight that a column of tiles belongs to, and the first column of tiles of that weight. The products
    of all weights are placed side by side.
    """
    which = column * 0
    first = column * 0
    behind = column * 0
    for index in tl.static_range(COUNT - 1):
        behind += ceil_div(ns[index], TILE_N)
        if column >= behind:
            which = column * 0 + index + 1
            first = behind
    return which, first


@triton.jit
def columns_of_tiles(ns, COUNT: tl.constexpr, TILE_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return how many columns of tiles the products of all weights have."""
    count = ceil_div(ns[0], TILE_N)
    for index in tl.static_range(1, COUNT):
        count += ceil_div(ns[index], TILE_N)
    return count


@triton.jit
def pick(values, which, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return ``values[which]``, of a tuple of ``COUNT``."""
    value = values[0]
    for index in tl.static_range(1, COUNT):
        if which == index:
            value = values[index]
    return value


@triton.jit
def weight_strides(  # type: ignore[no-untyped-def]
    ks, ns, which, COUNT: tl.constexpr, TRANSPOSED: tl.constexpr, STRIDED: tl.constexpr
):  # fmt: skip
    """Return the strides of a weight. Unless STRIDED, one of them is known to be 1: the first if TRANSPOSED, else the
    second.
    """
    if STRIDED:
        return pick(ks, which, COUNT), pick(ns, which, COUNT)
    elif TRANSPOSED:  # noqa: RET505 - Triton compiles one branch of the three, and nothing behind them
        return 1, pick(ns, which, COUNT)
    else:
        return pick(ks, which, COUNT), 1


@triton.jit
def dot(  # type: ignore[no-untyped-def]
    x, y, total, ACC: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    """Return ``total + x @ y``. With FAST, products of 8-bit floats may be accumulated less exactly than in float32."""
    if INTERPRETED and x.dtype.primitive_bitwidth < 32 and x.dtype != tl.float16:
        total = tl.dot(x.to(tl.float32), y.to(tl.float32), total, input_precision=PRECISION, out_dtype=ACC)
    elif FAST or x.dtype.primitive_bitwidth > 8:
        total = tl.dot(x, y, total, input_precision=PRECISION, out_dtype=ACC)
    else:
        # Tensor cores drop bits in sums of 8-bit products, so their sums are added to a float32 accumulator after each
        # step.
        step: tl.constexpr = x.shape[1]
        total = tl.dot(x, y, total, input_precision=PRECISION, out_dtype=ACC, max_num_imprecise_acc=step)
    return total


@triton.jit
def multiply_tile(  # type: ignore[no-untyped-def]
    a, b, start, stop, column, n, k, a_m, a_k, b_k, b_n,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, EVEN_K: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return one tile of ``A[start:stop] @ B[:, column:]``, in the accumulator's dtype.

    Rows from ``stop`` on repeat the last row: they are never stored, and loads without a mask are quicker.
    """
    rows = tl.minimum(start + tl.arange(0, TILE_M), stop - 1).to(tl.int64)
    columns = column + tl.arange(0, TILE_N)
    steps = tl.arange(0, TILE_K)
    a_tile = a + rows[:, None] * a_m + steps[None, :].to(tl.int64) * a_k
    b_tile = b + steps[:, None].to(tl.int64) * b_k + columns[None, :].to(tl.int64) * b_n
    inside = columns[None, :] < n
    total = tl.full((TILE_M, TILE_N), 0.0, ACC)
    step = tl.full((), TILE_K, tl.int64)  # times a stride of 2**25 elements, it would exceed 32 bits
    for at in tl.range(0, bound(k, INTERPRETED), TILE_K):
        if EVEN_K:
            x = tl.load(a_tile)
            y = tl.load(b_tile, mask=inside, other=0.0)
        else:
            x = tl.load(a_tile, mask=steps[None, :] < k - at, other=0.0)
            y = tl.load(b_tile, mask=(steps[:, None] < k - at) & inside, other=0.0)
        total = dot(x, y, total, ACC, PRECISION, FAST, INTERPRETED)
        a_tile += step * a_k
        b_tile += step * b_k
    return total


@triton.jit
def multiply_described_tile(  # type: ignore[no-untyped-def]
    a, b, row, column, k,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Do the same with tensor descriptors of A and of B or, if TRANSPOSED, of B.t(). They load zeros outside a tensor.

    Rows after the tile's last row are loaded too, and may not have arrived yet. Their products are never stored.
    """
    total = tl.full((TILE_M, TILE_N), 0.0, ACC)
    for at in tl.range(0, bound(k, INTERPRETED), TILE_K):
        x = a.load([row, at])
        y = b.load([column, at]).T if TRANSPOSED else b.load([at, column])
        total = dot(x, y, total, ACC, PRECISION, FAST, INTERPRETED)
    return total


@triton.jit
def finish_tile(  # type: ignore[no-untyped-def]
    sums, start, stop, column, n, row_scale, row_step, scales, steps, biases, which,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, COUNT: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return the sums of a tile times the scales of its rows and columns if SCALED, plus a bias if BIASED.

    Args:
        row_scale, row_step: a float32 array, and its step: row r has the scale at index ``row_step * r``. With a step
            of 0, all rows have the same scale.
        scales, steps: the same for the columns of each weight.
        biases: for each weight, one number for each column.
        which: the index of the weight, out of ``COUNT``.
    """
    rows = tl.minimum(start + tl.arange(0, TILE_M), stop - 1)
    columns = tl.minimum(column + tl.arange(0, TILE_N), n - 1)
    if SCALED:
        of_columns = tl.load(pick(scales, which, COUNT) + columns * pick(steps, which, COUNT))
        sums = sums * tl.load(row_scale + rows * row_step)[:, None] * of_columns[None, :]
    if BIASED:
        sums += tl.load(pick(biases, which, COUNT) + columns).to(ACC)[None, :]
    return sums


@triton.jit
def store_tile(  # type: ignore[no-untyped-def]
    product, sums, start, stop, column, n,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Round a tile to the product's dtype, and store the rows and columns of it that are inside the product."""
    rows = start + tl.arange(0, TILE_M)
    columns = column + tl.arange(0, TILE_N)
    tl.store(
        product + rows[:, None].to(tl.int64) * n + columns[None, :],
        rounded(sums, product.dtype.element_ty, INTERPRETED),
        mask=(rows[:, None] < stop) & (columns[None, :] < n),
    )
