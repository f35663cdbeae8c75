"""The kernel of the fused all-gather-matmul, in Triton's interpreter: values, flags, order, and waits that end."""

from __future__ import annotations

import itertools
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from symm_overlap.kernels import load
from symm_overlap.kernels.configuration import INTERPRETER, Configuration
from symm_overlap.kernels.flags import LINE, Expired, Flags
from symm_overlap.kernels.place import Machine, Place
from tests.kernels.interpreted import FLOATS, kernels, require_rounded
from tests.ranks import Pool, Rank

NAN = float("nan")
SMALL = Configuration(16, 16, 16, 2, 4, 1)
DESCRIBED = Configuration(16, 16, 32, 1, 4, 1, descriptors=True)


def flags_for(chunks: int, up: bool = True, seconds: float = 10.0) -> Flags:
    flags = Flags(torch.device("cpu"))
    flags.begin(chunks, seconds)
    for chunk in range(chunks if up else 0):
        flags.up(chunk)
    return flags


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def multiply(A: Tensor, B: Tensor, place: Place, programs: int, flags: Flags, tiles: Configuration | None) -> Tensor:
    """What the kernel makes of the own rows, and of gathered ones that lack them."""
    own = A[place.rank * place.rows : (place.rank + 1) * place.rows]
    gathered, product = A.clone(), torch.full((A.shape[0], B.shape[1]), NAN, dtype=A.dtype)
    gathered[place.rank * place.rows : (place.rank + 1) * place.rows] = NAN
    machine = Machine(INTERPRETER, programs + 1)
    kernels("all_gather_matmul").all_gather_matmul(
        own.clone(), gathered, B, product, flags, place, machine, configuration=tiles
    )
    return product


# rank, world, rows of a rank, chunks, N, K: tiles that cross ranks and chunks, that are whole, and that are cut.
SHAPES = [
    (0, 1, 5, 1, 3, 7),
    (1, 3, 5, 2, 17, 16),
    (2, 3, 16, 1, 32, 33),
    (0, 4, 17, 3, 7, 1),
    (3, 4, 1, 1, 1, 40),
    (1, 2, 33, 4, 16, 0),
    (1, 2, 4, 3, 0, 5),
    (0, 2, 0, 1, 4, 5),
]


def against_float64(me: Rank) -> None:
    ways = itertools.cycle(itertools.product(FLOATS, ((1, None, False), (3, SMALL, True), (2, SMALL, False))))
    for shape, (dtype, (programs, tiles, transposed)) in zip(SHAPES * 2, ways, strict=False):
        rank, world, rows, chunks, n, k = shape
        A = random(world * rows, k, dtype=dtype, seed=1)
        B = random(n, k, dtype=dtype, seed=2).t() if transposed else random(k, n, dtype=dtype, seed=2)
        place = Place(rank, world, rows, -(-rows // chunks), chunks)
        found = multiply(A, B, place, programs, flags_for(world * chunks), tiles)
        require_rounded(found, A.double() @ B.double(), k)
    for dtype, transposed in ((torch.bfloat16, False), (torch.float16, True)):
        A = random(60, 48, dtype=dtype, seed=1)
        B = random(32, 48, dtype=dtype, seed=2).t() if transposed else random(48, 32, dtype=dtype, seed=2)
        found = multiply(A, B, Place(1, 3, 20, 10, 2), 1, flags_for(6), DESCRIBED)
        require_rounded(found, A.double() @ B.double(), 48)


def test_any_shape_and_dtype_against_float64(ranks: Pool) -> None:
    ranks.run(1, against_float64)


def waits_for_what_it_reads(me: Rank) -> None:
    """Each chunk comes as late as it can: a wait for one that is not up yet brings it, and says which it was."""
    place = Place(1, 3, 20, 10, 2)
    A, B = random(60, 8, dtype=torch.float32, seed=3), random(8, 20, dtype=torch.float32, seed=4)
    gathered, product = torch.full_like(A, NAN), torch.full((60, 20), NAN)
    flags, asked = flags_for(6, up=False), []

    def bring(words: object, status: object, chunk: int, *more: object) -> None:
        chunk = int(chunk)
        if chunk not in asked:
            asked.append(chunk)
            gathered[chunk * 10 : (chunk + 1) * 10] = A[chunk * 10 : (chunk + 1) * 10]
            flags.up(chunk)

    module = kernels("all_gather_matmul")
    with mock.patch.dict(module.all_gather_matmul_kernel.rewrite().__globals__, wait_for_flag=bring):
        module.all_gather_matmul(
            A[20:40].clone(), gathered, B, product, flags, place, Machine(INTERPRETER, 2), configuration=SMALL
        )
    # The own chunks, 2 and 3, are not waited for; then rank 2's and rank 0's, in the order of arrival.
    assert asked == [4, 5, 0, 1]
    torch.testing.assert_close(product, A @ B)


def test_tiles_wait_for_the_chunks_that_they_read_in_the_order_of_arrival(ranks: Pool) -> None:
    ranks.run(1, waits_for_what_it_reads)


def ends_in_time(me: Rank) -> None:
    place = Place(0, 2, 4, 4, 1)
    A, B = torch.ones(8, 4), torch.ones(4, 4)
    flags = flags_for(2, up=False, seconds=20e-6)  # 20 polls
    multiply(A, B, place, 1, flags, None)
    assert flags.finish([]) == Expired(1, 1, 0)
    # The host gives up, before or during the wait.
    flags = flags_for(2, up=False, seconds=1000.0)
    timer = threading.Timer(0.05, flags.abandon, [KeyboardInterrupt()])
    timer.start()
    start = time.monotonic()
    product = multiply(A, B, place, 1, flags, None)
    assert time.monotonic() - start < 5
    assert flags.finish([]) is None
    assert torch.equal(product[:4], torch.full((4, 4), 4.0))  # the own rows wait for nobody


def test_a_wait_that_nobody_ends_is_over_after_its_limit_and_says_what_it_waited_for(ranks: Pool) -> None:
    ranks.run(1, ends_in_time)


def wraps(me: Rank) -> None:
    """2**32 calls later: epochs are compared cyclically, and a flag of the last call is not up."""
    flags = Flags(torch.device("cpu"))
    flags.epoch = 2**31 - 2
    A, B = torch.ones(4, 4), torch.ones(4, 4)
    for epoch in (2**31 - 1, -(2**31), -(2**31) + 1):
        flags.begin(2, 20e-6)
        assert flags.epoch == epoch
        flags.up(1)
        multiply(A, B, Place(0, 2, 2, 2, 1), 1, flags, None)
        assert flags.finish([]) is None
    flags.begin(2, 20e-6)
    multiply(A, B, Place(0, 2, 2, 2, 1), 1, flags, None)
    assert flags.finish([]) == Expired(1, -(2**31) + 2, -(2**31) + 1)


def test_epochs_wrap(ranks: Pool) -> None:
    ranks.run(1, wraps)


def raised_by_the_peer(me: Rank) -> None:
    """The other process writes rows and flag while the kernel polls; the flags lie in symmetric memory."""
    words = symm_mem.empty(2 * LINE * 4, dtype=torch.uint8).zero_().view(torch.int32)
    rows = symm_mem.empty(8, 4, dtype=torch.float32).fill_(NAN)
    at_words, at_rows = symm_mem.rendezvous(words, me.group), symm_mem.rendezvous(rows, me.group)
    at_words.barrier()
    if me.rank == 1:
        time.sleep(0.2)
        at_rows.get_buffer(0, (8, 4), torch.float32)[4:] = 3.0
        at_words.get_buffer(0, (2 * LINE,), torch.int32)[LINE] = 1
    else:
        flags, product = flags_for(2, up=False), torch.full((8, 2), NAN)
        with mock.patch.object(Flags, "words", words):
            start = time.monotonic()
            kernels("all_gather_matmul").all_gather_matmul(
                torch.ones(4, 4), rows, torch.ones(4, 2), product, flags, Place(0, 2, 4, 4, 1), Machine(INTERPRETER, 2)
            )
        assert time.monotonic() - start > 0.1
        assert product.tolist() == [[4.0, 4.0]] * 4 + [[12.0, 12.0]] * 4
    at_words.barrier()


def test_another_process_raises_the_flag_while_the_kernel_polls(ranks: Pool) -> None:
    ranks.run(2, raised_by_the_peer)


def test_kernels_for_gpus_are_not_run_on_a_cpu() -> None:
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before"):
        load("all_gather_matmul", INTERPRETER)
    assert load("all_gather_matmul", 90)
