"""The kernel of the fused all-gather-matmul, in Triton's interpreter: values, flags, order, and waits that end."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from symm_overlap.kernels import load
from symm_overlap.kernels.configuration import INTERPRETER, Configuration
from symm_overlap.kernels.factor import Factor
from symm_overlap.kernels.flags import EPOCH, FEWEST, LINE, TIMED_OUT, Expired, Flags
from symm_overlap.kernels.place import Machine, Place
from tests.kernels.interpreted import CALLER, FLOATS, kernels, require_rounded
from tests.limits import SOON
from tests.ranks import Pool, Rank

NAN = float("nan")
SMALL = Configuration(16, 16, 16, 2, 4, 1)
DESCRIBED = Configuration(16, 16, 32, 1, 4, 1, descriptors=True)


def flags_for(chunks: int, up: bool = True, seconds: float = 10.0) -> Flags:
    flags = Flags(torch.device("cpu"))
    flags.begin(chunks, seconds, CALLER)
    for chunk in range(chunks if up else 0):
        flags.up(chunk)
    return flags


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def evenly(rank: int, world: int, rows: int, chunks: int) -> Place:
    """Return the place of a rank if every rank has ``rows`` rows."""
    return Place(rank, world * rows, rows, -(-rows // chunks), chunks, world)


def multiply(
    A: Tensor,
    factors: list[Factor],
    place: Place,
    programs: int,
    flags: Flags,
    tiles: Configuration | None,
    **more: Any,
) -> Tensor:
    """Let the kernel multiply this rank's own rows, and gathered rows that lack them. Return the first product."""
    mine = slice(place.rank * place.rows, (place.rank + 1) * place.rows)
    own, gathered = A[mine].clone(), A.clone()
    gathered[mine] = NAN
    machine = Machine(INTERPRETER, programs + 1)
    kernels("all_gather_matmul").all_gather_matmul(
        own, gathered, factors, flags, place, machine, configuration=tiles, **more
    )
    return factors[0].product


def factor(A: Tensor, B: Tensor, *more: Any, dtype: torch.dtype | None = None) -> Factor:
    return Factor(B, torch.full((A.shape[0], B.shape[1]), NAN, dtype=dtype or A.dtype), *more)


# (rank, world, rows of a rank, chunks, N, K): some tiles cross ranks and chunks, some are whole, and some are cut off.
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
        place = evenly(rank, world, rows, chunks)
        found = multiply(A, [factor(A, B)], place, programs, flags_for(world * chunks), tiles)
        require_rounded(found, A.double() @ B.double(), k)
    for dtype, transposed in ((torch.bfloat16, False), (torch.float16, True)):
        A = random(60, 48, dtype=dtype, seed=1)
        Bs = [random(n, 48, dtype=dtype, seed=n) for n in (32, 48, 16)]
        factors = [factor(A, B.t() if transposed else B.t().contiguous()) for B in Bs]
        multiply(A, factors, evenly(1, 3, 20, 2), 1, flags_for(6), DESCRIBED)
        for B, each in zip(Bs, factors, strict=True):
            require_rounded(each.product, A.double() @ B.t().double(), 48)


def test_any_shape_and_dtype_against_float64(ranks: Pool) -> None:
    ranks.run(1, against_float64)


def many_weights(me: Rank) -> None:
    """Weights may have any layout and number. One launch multiplies up to four weights of the same kind."""
    A, place = random(33, 8, dtype=torch.float32, seed=1), evenly(1, 3, 11, 2)
    bias = random(40, dtype=torch.float32, seed=3)
    Bs = [random(8, n, dtype=torch.float32, seed=n) for n in (5, 17, 0, 40, 16, 1)]
    Bs += [random(n, 8, dtype=torch.float32, seed=n).t() for n in (40, 3)]
    Bs += [random(16, 80, dtype=torch.float32, seed=4)[::2, ::2]]
    factors = [factor(A, B, None, bias if B.shape[1] == 40 else None) for B in Bs]
    module = kernels("all_gather_matmul")
    with mock.patch.object(module, "launch", wraps=module.launch) as launched:
        multiply(A, factors, place, 2, flags_for(6), SMALL)
    assert sorted(call.kwargs["COUNT"] for call in launched.call_args_list) == [1, 1, 1, 1, 4]
    for B, each in zip(Bs, factors, strict=True):
        exact = A.double() @ B.double()
        require_rounded(each.product, exact if each.bias is None else exact + bias.double(), 8)
    # The same weight five times: four in one launch, and one in another.
    factors = [factor(A, Bs[1]) for _ in range(5)]
    with mock.patch.object(module, "launch", wraps=module.launch) as launched:
        multiply(A, factors, place, 1, flags_for(6), SMALL)
    assert [call.kwargs["COUNT"] for call in launched.call_args_list] == [4, 1]
    assert all(torch.equal(each.product, factors[0].product) for each in factors)


def test_several_weights_in_one_launch(ranks: Pool) -> None:
    ranks.run(1, many_weights)


def waits_for_what_it_reads(me: Rank) -> None:
    """Each chunk arrives as late as possible: the wait for a chunk delivers it, and records its number."""
    place = evenly(1, 3, 20, 2)
    A, B = random(60, 8, dtype=torch.float32, seed=3), random(8, 20, dtype=torch.float32, seed=4)
    gathered, made = torch.full_like(A, NAN), factor(A, B)
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
            A[20:40].clone(), gathered, [made], flags, place, Machine(INTERPRETER, 2), configuration=SMALL
        )
    # The kernel does not wait for its own chunks, 2 and 3. It waits for those of rank 2, and then for those of rank 0,
    # in the order of arrival.
    assert asked == [4, 5, 0, 1]
    torch.testing.assert_close(made.product, A @ B)


def test_tiles_wait_for_the_chunks_that_they_read_in_the_order_of_arrival(ranks: Pool) -> None:
    ranks.run(1, waits_for_what_it_reads)


def ends_in_time(me: Rank) -> None:
    place = evenly(0, 2, 4, 1)
    A, B = torch.ones(8, 4), torch.ones(4, 4)
    flags = flags_for(2, up=False, seconds=20e-6)  # 20 polls
    multiply(A, [factor(A, B)], place, 1, flags, None)
    assert flags.failure() == Expired(1, 1, 0, CALLER)
    # The host gives up, before or during the wait.
    flags = flags_for(2, up=False, seconds=1000.0)
    timer = threading.Timer(0.05, flags.abandon, [KeyboardInterrupt()])
    timer.start()
    start = time.monotonic()
    product = multiply(A, [factor(A, B)], place, 1, flags, None)
    assert time.monotonic() - start < SOON
    assert flags.failure() is None
    assert torch.equal(product[:4], torch.full((4, 4), 4.0))  # the own rows need no wait


def test_a_wait_that_nobody_ends_is_over_after_its_limit_and_says_what_it_waited_for(ranks: Pool) -> None:
    ranks.run(1, ends_in_time)


def wraps(me: Rank) -> None:
    """Epochs are compared cyclically, so they may wrap after 2**32 calls. A flag of the previous call is not up."""
    A, B, place = torch.ones(4, 4), torch.ones(4, 4), evenly(0, 2, 2, 1)
    for last, epoch in ((2**31 - 2, 2**31 - 1), (2**31 - 1, -(2**31)), (-(2**31), -(2**31) + 1), (-1, 0)):
        flags = Flags(torch.device("cpu"))
        flags.status[EPOCH] = last
        flags.begin(2, 20e-6, CALLER)
        assert flags.epoch == epoch
        flags.up(1)
        multiply(A, [factor(A, B)], place, 1, flags, None)
        assert flags.failure() is None
        flags.begin(2, 20e-6, CALLER)
        multiply(A, [factor(A, B)], place, 1, flags, None)
        assert flags.failure() == Expired(1, flags.epoch, epoch, CALLER)


def test_epochs_wrap(ranks: Pool) -> None:
    ranks.run(1, wraps)


def test_more_flags_are_down_and_what_was_reported_stays() -> None:
    """When a call needs more flags, the new ones are not up, and a reported failure is kept."""
    flags = flags_for(2)
    before, flags.status[0] = flags.words, TIMED_OUT
    flags.begin(FEWEST + 1, 1.0, CALLER)
    assert flags.words.data_ptr() != before.data_ptr()
    assert flags.words[::LINE].tolist() == [1] * len(flags.counters), "the epoch of the previous call"
    assert len(flags.counters) >= FEWEST + 1
    assert flags.epoch == 2
    assert flags.failure() == Expired(0, 0, 0, CALLER)


def raised_by_the_peer(me: Rank) -> None:
    """The other process writes rows and the flag while the kernel polls. The flags are in symmetric memory."""
    words = symm_mem.empty(2 * LINE * 4, dtype=torch.uint8).zero_().view(torch.int32)
    rows = symm_mem.empty(8, 4, dtype=torch.float32).fill_(NAN)
    at_words, at_rows = symm_mem.rendezvous(words, me.group), symm_mem.rendezvous(rows, me.group)
    at_words.barrier()
    if me.rank == 1:
        time.sleep(0.2)
        at_rows.get_buffer(0, (8, 4), torch.float32)[4:] = 3.0
        at_words.get_buffer(0, (2 * LINE,), torch.int32)[LINE] = 1
    else:
        flags, made = flags_for(2, up=False), factor(rows, torch.ones(4, 2))
        flags.words = words
        start = time.monotonic()
        kernels("all_gather_matmul").all_gather_matmul(
            torch.ones(4, 4), rows, [made], flags, evenly(0, 2, 4, 1), Machine(INTERPRETER, 2)
        )
        assert time.monotonic() - start > 0.1
        assert made.product.tolist() == [[4.0, 4.0]] * 4 + [[12.0, 12.0]] * 4
    at_words.barrier()


def test_another_process_raises_the_flag_while_the_kernel_polls(ranks: Pool) -> None:
    ranks.run(2, raised_by_the_peer)


def test_kernels_for_gpus_are_not_run_on_a_cpu() -> None:
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before"):
        load("all_gather_matmul", INTERPRETER)
    assert load("all_gather_matmul", 90)
