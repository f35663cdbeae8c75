"""Rounding the sums of a tile to the dtype of the product: to the nearest number, ties to even.

GPUs round in this way by themselves, and turn a number beyond the range of float8 into the largest float8 number.
Triton's interpreter drops bits instead. For the interpreter, this module implements what torch's conversion does on a
CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BEYOND_E4M3 = tl.constexpr(int(torch.tensor(1e9).to(torch.float8_e4m3fn).view(torch.uint8)))
"""The bits of torch's result for a number beyond the range of float8_e4m3fn: NaN in torch 2.11, the largest number
from 2.13 on. Larger numbers have larger bits.
"""

INFINITY_E5M2 = tl.constexpr(0x7C)


@triton.jit
def rounded(sums, dtype: tl.constexpr, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the numbers of ``dtype`` that are nearest to ``sums``, which are float32 unless ``dtype`` is float64."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = sums.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        result = tl.where(sums == sums, nearest.to(tl.float32, bitcast=True), sums).to(dtype)
    elif INTERPRETED and dtype.primitive_bitwidth == 8:
        result = float8_bits(sums, dtype.fp_mantissa_width, dtype.exponent_bias).to(dtype, bitcast=True)
    else:
        result = sums.to(dtype)
    return result


@triton.jit
def float8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the bits of the 8-bit floats that are nearest to float32 numbers, for the interpreter.

    Args:
        MANTISSA, BIAS: the number of bits of the mantissa, and the bias of the exponent: 3 and 7, or 2 and 15.
    """
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    drop = 23 - MANTISSA
    half = (1 << (drop - 1)) - 1 + ((size >> drop) & 1)
    normal = ((size + half) >> drop) - ((127 - BIAS) << MANTISSA)
    # Subnormal numbers are multiples of one unit. At 2**23 units, which are added here, the last bit of a float32 is
    # also one unit. So the addition rounds to whole units, and the lowest bits of the result are the number of units.
    units = tl.full(size.shape, (151 - BIAS - MANTISSA) << 23, tl.uint32)
    small = (size.to(tl.float32, bitcast=True) + units.to(tl.float32, bitcast=True)).to(tl.uint32, bitcast=True) - units
    nearest = tl.where(size < (128 - BIAS) << 23, small, normal)
    beyond = BEYOND_E4M3 if MANTISSA == 3 else INFINITY_E5M2
    nearest = tl.where(x == x, tl.minimum(nearest, beyond), 0x7F)
    return ((bits >> 24 & 0x80) | nearest).to(tl.uint8)
