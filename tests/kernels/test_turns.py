"""Triton's interpreter runs one kernel at a time, so the kernels of several lanes take turns."""

from __future__ import annotations

import threading
import time
from unittest import mock

import torch

from tests.kernels.interpreted import CALLER
from tests.kernels.test_all_gather_matmul import evenly, factor, flags_for, multiply
from tests.ranks import Pool, Rank


def gives_way(me: Rank) -> None:
    """A kernel waits for a flag that is raised after another kernel. If it did not give way, it would wait for ever."""
    place, A, B = evenly(0, 2, 4, 1), torch.ones(8, 4), torch.ones(4, 4)
    first, second = flags_for(2, up=False, seconds=1000.0), flags_for(2)
    products = []
    waiting = threading.Thread(
        target=lambda: products.append(multiply(A, [factor(A, B)], place, 1, first, None)), daemon=True
    )
    waiting.start()
    time.sleep(0.05)
    for _ in range(2):
        assert torch.equal(multiply(A, [factor(A, B)], place, 1, second, None), torch.full((8, 4), 4.0))
        assert waiting.is_alive()
    first.up(1)
    waiting.join(10)
    assert torch.equal(products[0], torch.full((8, 4), 4.0))
    assert first.failure() is None


def test_a_kernel_that_waits_gives_way_to_others_in_the_interpreter(ranks: Pool) -> None:
    ranks.run(1, gives_way)


def has_all_it_waits_for(me: Rank) -> None:
    """A kernel that has received all its chunks continues, even if another one asks it to give way. If it started again
    instead, two slow kernels could interrupt each other for ever.
    """
    place, A, B, flags = evenly(0, 2, 4, 1), torch.ones(8, 4), torch.ones(4, 4), flags_for(2)
    flags.interrupt()
    with mock.patch.object(flags, "resume", wraps=flags.resume) as ended:
        multiply(A, [factor(A, B)], place, 1, flags, None)
    assert ended.call_count == 1
    flags.begin(2, 10.0, CALLER)
    threading.Timer(0.05, flags.up, [1]).start()
    with mock.patch.object(flags, "resume", wraps=flags.resume) as ended:
        assert torch.equal(multiply(A, [factor(A, B)], place, 1, flags, None), torch.full((8, 4), 4.0))
    assert ended.call_count == 1, "the request does not apply to the next call"


def test_a_kernel_that_has_all_it_waits_for_is_not_run_again(ranks: Pool) -> None:
    ranks.run(1, has_all_it_waits_for)
