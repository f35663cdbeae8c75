"""One parallel module in several threads."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed.tensor.parallel import parallelize_module

import symm_overlap
from symm_overlap.nn import ColwiseParallel
from tests.nn.blocks import WIDTH
from tests.nn.blocks import whole as whole_input
from tests.nn.reference import mesh_of, values
from tests.nn.test_sharing import Three
from tests.ranks import Pool, Rank


def in_threads(me: Rank) -> None:
    """Threads take turns within the module's forward, where each finds the products of its own call."""
    torch.manual_seed(0)
    inside = threading.Barrier(3)
    column = ColwiseParallel()
    plan = {"": whole_input(1), "a": column, "b": column}
    whole = Three("no_gradient_through_one").double()
    module = parallelize_module(copy.deepcopy(whole), mesh_of(me), plan)
    inner = module.forward_of_prepared
    module.forward_of_prepared = lambda x: (inside.wait(20), inner(x))[1]

    def calls(lane: int) -> None:
        with symm_overlap.lane(lane), symm_overlap.timeout(20):
            for seed in range(10):
                x = values((2, 4, WIDTH), seed + 100 * lane).requires_grad_()
                mine = x.detach().chunk(me.world, 1)[me.rank].requires_grad_()
                (expected,) = torch.autograd.grad(whole(x).square().sum(), x)
                (found,) = torch.autograd.grad(module(mine).square().sum(), mine)
                torch.testing.assert_close(found, expected.chunk(me.world, 1)[me.rank])

    with ThreadPoolExecutor(3) as threads:
        for call in [threads.submit(calls, lane) for lane in range(3)]:
            call.result()


def test_threads_may_share_a_module_if_each_has_a_lane(ranks: Pool) -> None:
    ranks.run(2, in_threads)
