"""The kernel of the fused matmul-reduce-scatter, in Triton's interpreter: values, and flags of finished chunks."""

from __future__ import annotations

import itertools
import mmap
from unittest import mock

import torch

from symm_overlap.kernels.configuration import INTERPRETER, Configuration
from symm_overlap.kernels.flags import LINE
from symm_overlap.kernels.place import Machine, Place
from symm_overlap.kernels.tile_order import chunk_rows_of
from tests.kernels.interpreted import CALLER, FLOATS, kernels, require_rounded
from tests.kernels.test_all_gather_matmul import DESCRIBED, NAN, SHAPES, SMALL, evenly, factor, flags_for, random
from tests.ranks import Pool, Rank

MAP_NORESERVE = 0x4000  # Linux; Python has no name for it before 3.13


def against_float64(me: Rank) -> None:
    ways = itertools.cycle(itertools.product(FLOATS, ((1, None, False), (3, SMALL, True), (2, SMALL, False))))
    for number, (shape, (dtype, (programs, tiles, transposed))) in enumerate(zip(SHAPES * 2, ways, strict=False)):
        rank, world, rows, chunks, n, k = shape
        # In half of the cases, the rows do not divide evenly, as for an all-reduce: the last ranks have fewer, or none.
        # In some of these cases, the kernel runs as the last rank, which has one row less.
        total = max(0, world * rows - (0, world + 1, 0, 1)[number % 4])
        rank, rows = world - 1 if number % 4 == 3 else rank, -(-total // world)
        # A has rows with gaps between them, or contiguous columns.
        A = random(total, k + 3, dtype=dtype, seed=1)[:, :k]
        A = A.t().contiguous().t() if transposed else A
        B = random(n, k, dtype=dtype, seed=2).t() if transposed else random(k, n, dtype=dtype, seed=2)
        bias = random(n, dtype=dtype, seed=3) if number % 3 == 0 else None
        place = Place(rank, total, rows, -(-rows // chunks), chunks, world)
        flags, made = flags_for(world * chunks, up=False), factor(A, B, None, bias)
        for _ in range(2):  # the second call uses the counters that the first one has left
            flags.begin(world * chunks, 10.0, CALLER)
            kernels("matmul_reduce_scatter").matmul_reduce_scatter(
                A, made, flags, place, Machine(INTERPRETER, programs + 1), configuration=tiles
            )
            assert flags.words[::LINE].tolist()[: world * chunks] == [flags.epoch] * (world * chunks)
            assert not flags.counters.any()
        exact = A.double() @ B.double()
        require_rounded(made.product, exact if bias is None else exact + bias.double(), k + 1)
    A, B = random(60, 48, dtype=torch.bfloat16, seed=1), random(32, 48, dtype=torch.bfloat16, seed=2).t()
    made = factor(A, B)
    kernels("matmul_reduce_scatter").matmul_reduce_scatter(
        A, made, flags_for(6), evenly(1, 3, 20, 2), Machine(INTERPRETER, 2), configuration=DESCRIBED
    )
    require_rounded(made.product, A.double() @ B.double(), 48)


def test_any_shape_and_dtype_against_float64_and_every_flag_is_up(ranks: Pool) -> None:
    ranks.run(1, against_float64)


def strides_do_not_overflow(me: Rank) -> None:
    """Rows of the weight lie so far apart that a step along K exceeds 32 bits. Only touched pages need memory."""
    tiles = Configuration(16, 16, 16, 1, 4, 1)
    stride, k = 2**32 // tiles.tile_k, tiles.tile_k + 1
    spread = mmap.mmap(-1, 2 * (tiles.tile_k * stride + 16), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    B = torch.frombuffer(spread, dtype=torch.float16).as_strided((k, 16), (stride, 1))
    B.copy_(random(k, 16, dtype=torch.float16, seed=2))
    A = random(16, k, dtype=torch.float16, seed=1)
    made = factor(A, B)
    kernels("matmul_reduce_scatter").matmul_reduce_scatter(
        A, made, flags_for(1), evenly(0, 1, 16, 1), Machine(INTERPRETER, 2), configuration=tiles
    )
    require_rounded(made.product, A.double() @ B.double(), k)


def test_strides_of_a_weight_may_be_as_large_as_memory(ranks: Pool) -> None:
    ranks.run(1, strides_do_not_overflow)


def flags_are_raised_behind_their_rows(me: Rank) -> None:
    """When a flag goes up, the rows of its chunk are complete. Chunks are finished in the order of the copies."""
    place, module = evenly(1, 3, 20, 3), kernels("matmul_reduce_scatter")
    tiles = Configuration(16, 16, 16, 1, 4, 1)
    A, B = random(60, 8, dtype=torch.float32, seed=3), random(8, 20, dtype=torch.float32, seed=4)
    flags, made, came = flags_for(9, up=False), factor(A, B), []
    product = made.product
    count = module.tile_is_done
    lengths = chunk_rows_of(place)
    assert lengths == [7, 7, 6] * 3

    def look(*arguments: object) -> None:
        count(*arguments)
        for chunk, up in enumerate(flags.words[::LINE].tolist()):
            if up and chunk not in came:
                first = chunk // 3 * 20 + chunk % 3 * 7
                assert not product[first : first + lengths[chunk]].isnan().any(), chunk
                came.append(chunk)

    for programs in (1, 2):
        came.clear()
        product.fill_(NAN)
        flags.begin(9, 1.0, CALLER)
        flags.words.zero_()
        with mock.patch.dict(module.matmul_reduce_scatter_kernel.rewrite().__globals__, tile_is_done=look):
            module.matmul_reduce_scatter(A, made, flags, place, Machine(INTERPRETER, programs + 1), configuration=tiles)
        if programs == 1:
            assert came == [6, 7, 8, 0, 1, 2, 3, 4, 5]
    torch.testing.assert_close(product, A @ B)


def test_a_flag_goes_up_once_all_rows_of_its_chunk_are_there(ranks: Pool) -> None:
    ranks.run(1, flags_are_raised_behind_their_rows)
