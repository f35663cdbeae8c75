"""Scaled products of float8 numbers, by the kernels in Triton's interpreter: scales, biases and rounding."""

from __future__ import annotations

import torch

from symm_overlap.kernels.configuration import Configuration
from tests.collective.scaled_cases import E4M3, E5M2, bits
from tests.kernels.test_all_gather_matmul import DESCRIBED, NAN, SMALL, evenly, factor, flags_for, multiply, random
from tests.ranks import Pool, Rank


def of_float8(me: Rank) -> None:
    """Test one scale or one for each row and column, of any sign, with biases, and with pointers and descriptors."""
    for dtype, other in ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)):
        A = (random(60, 48, dtype=torch.float32, seed=1) - 0.5).to(dtype)
        B = (random(32, 48, dtype=torch.float32, seed=2) - 0.5).to(other).t()
        rows = random(60, 1, dtype=torch.float32, seed=3) - 0.5
        columns, bias = random(1, 32, dtype=torch.float32, seed=4), random(32, dtype=torch.bfloat16, seed=5)
        for row_scale, scale, offset, product, tiles in (
            (rows, columns, bias, torch.bfloat16, DESCRIBED),
            (rows[:1], columns, None, torch.float32, SMALL),
            (rows, columns[:, :1], bias, torch.float16, SMALL),
            (rows[0, 0], columns[0, 0], None, torch.bfloat16, None),
            (rows, columns, bias, E4M3, DESCRIBED),
        ):
            result_scale = torch.tensor(3.0) if product == E4M3 else None
            made = factor(A, B, scale, offset, False, result_scale, dtype=product)
            found = multiply(A, [made], evenly(1, 3, 20, 2), 1, flags_for(6), tiles, row_scale=row_scale)
            exact = A.double() @ B.double() * row_scale.double() * scale.double()
            exact = exact if offset is None else exact + offset.double()
            exact, eps = exact * (result_scale or 1.0), torch.finfo(product).eps / 2
            # The terms have any sign. The absolute error has one float32 rounding per term and, for float8 products,
            # half of the spacing of the smallest float8 numbers.
            absolute = 48 * torch.finfo(torch.float32).eps + (2.0**-10 if product == E4M3 else 0.0)
            torch.testing.assert_close(found.double(), exact, rtol=eps, atol=absolute)


def test_float8_with_scales_and_bias_against_float64(ranks: Pool) -> None:
    ranks.run(1, of_float8)


def rounds_as_torch_does(me: Rank) -> None:
    """Round every float8 number, the midpoints between them, and their float32 neighbours. Also too large numbers and
    NaN.
    """
    one = torch.ones(1, 1)
    for dtype in (E4M3, E5M2):
        all_bits = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        numbers = all_bits[all_bits.isfinite()].unique()
        points = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
        points = torch.cat([points, *(torch.nextafter(points, torch.tensor(to)) for to in (-1e9, 1e9))])
        points = torch.cat([points, torch.tensor([-0.0, 1e-45, 465.0, -480.0, 61440.0, -1e30, NAN, -torch.inf])])
        rows, whole = len(points), Configuration(2048, 1, 1, 1, 4, 1)
        A, half = torch.ones(rows, 1).to(dtype), torch.tensor(0.5)
        made = factor(A, one.to(dtype), one, None, False, half, dtype=dtype)
        multiply(A, [made], evenly(0, 1, rows, 1), 1, flags_for(1), whole, row_scale=points.view(-1, 1) * 2)
        assert torch.equal(bits(made.product.flatten()), bits(points.to(dtype)))


def test_products_in_float8_are_rounded_as_torch_rounds_them_on_cpu(ranks: Pool) -> None:
    ranks.run(1, rounds_as_torch_does)
