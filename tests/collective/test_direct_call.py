"""A call bypasses the dispatcher only if the dispatcher would pass it on unchanged, and nothing must see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, IntEnum
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import symm_overlap
from symm_overlap import _C
from symm_overlap.collective.dispatch import direct_call
from tests.ranks import Pool, Rank
from tests.transforms import comparing

OP = torch.ops.symm_overlap.fused_all_gather_matmul.default
NAME = "symm_overlap::fused_all_gather_matmul"


@contextmanager
def counted() -> Iterator[list[Any]]:
    """Yield a list to which the arguments of calls that go straight to the op's kernel are added."""
    seen: list[Any] = []
    kernel = direct_call.KERNELS[OP]

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return kernel(*args, **kwargs)

    with mock.patch.dict(direct_call.KERNELS, {OP: spy}):
        yield seen


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


class Dispatches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def passes(me: Rank) -> Callable[[], tuple[Tensor | None, list[Tensor]]]:
    """Return a call that can go straight to its kernel."""
    A, B = torch.ones(3, 4) * (me.rank + 1), torch.ones(4, 5)

    def call() -> tuple[Tensor | None, list[Tensor]]:
        return symm_overlap.all_gather_matmul(A, [B], 0, me.group)

    call()
    return call


def goes_to_the_kernel(me: Rank) -> None:
    call = passes(me)
    expected = torch.arange(1, me.world + 1).repeat_interleave(3)[:, None].float()
    surroundings: list[Callable[[], AbstractContextManager[Any]]] = [torch.enable_grad, torch.no_grad]
    for around in [*surroundings, torch.inference_mode]:
        with around(), counted() as seen:
            A, (product,) = call()
            assert len(seen) == 1
            assert A is not None
            assert torch.equal(A, expected.expand(-1, 4))
            assert torch.equal(product, 4 * expected.expand(-1, 5))
            product.add_(1)  # allowed: not a view that autograd tracks
    with counted() as seen:
        parameter = torch.nn.Parameter(torch.ones(4, 5))
        for weight in (parameter, parameter.requires_grad_(False)):
            with torch.no_grad():
                symm_overlap.all_gather_matmul(torch.ones(2, 4), [weight] * 2, 0, me.group, return_A=False)
        symm_overlap.all_gather_matmul(torch.ones(2, 4), [parameter], 0, me.group)
        assert len(seen) == 3


def is_seen(me: Rank) -> None:
    call = passes(me)
    with counted() as seen:
        for mode in (Functions(), Dispatches()):
            with mode:
                call()
            assert mode.seen.count(OP) == 1, mode
        with FlopCounterMode(display=False) as flop:
            call()
        assert flop.get_total_flops() == 2 * 3 * me.world * 4 * 5
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        assert [event.count for event in profile.key_averages() if event.key == NAME] == [1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert call()[1][0].dtype == torch.bfloat16
        graph = make_fx(lambda x: symm_overlap.all_gather_matmul(x, [torch.ones(4, 5)], 0, me.group)[1])(
            torch.ones(3, 4)
        )
        assert OP in {node.target for node in graph.graph.nodes}
        mine = torch.ones(3, 4).as_subclass(Subclass)
        assert type(symm_overlap.all_gather_matmul(mine, [torch.ones(4, 5)], 0, me.group)[1][0]) is Subclass
        weight = torch.ones(4, 5, requires_grad=True)
        symm_overlap.all_gather_matmul(torch.ones(3, 4), [weight], 0, me.group)[1][0].sum().backward()
        assert torch.equal(weight.grad, torch.full((4, 5), 3.0 * me.world))
        with pytest.raises(NotImplementedError, match="cannot be vmapped"):
            torch.vmap(lambda x: symm_overlap.all_gather_matmul(x, [torch.ones(4, 5)], 0, me.group)[1])(
                torch.ones(2, 3, 4)
            )
        assert not seen


def is_rejected(me: Rank) -> None:
    passes(me)
    A, B = torch.ones(3, 4), torch.ones(4, 5)
    with counted() as seen:
        for wrong in ((A, [B], 0.0), (A, [B], "0"), (A, [B], None), ("A", [B], 0), (A, ["B"], 0), (A.numpy(), [B], 0)):
            for _ in range(2):
                with pytest.raises(TypeError):
                    symm_overlap.all_gather_matmul(*wrong, me.group)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="takes tensors on CPU or CUDA"):
            symm_overlap.all_gather_matmul(A.to_sparse(), [B], 0, me.group)
        assert not seen


class Way(str, Enum):
    SUM = "sum"


class Dim(IntEnum):
    FIRST = 0
    SECOND = 1


def is_converted(me: Rank) -> None:
    """Arguments that the dispatcher converts go through the dispatcher every time."""
    passes(me)
    X, B = torch.full((2, 4), me.rank + 1.0), torch.ones(4, 5)
    for kind in (torch.tensor, Dim):
        shapes = [tuple(symm_overlap.all_gather(X, kind(dim), me.group).shape) for dim in (0, 0, 1, 0)]
        assert shapes == [(4, 4), (4, 4), (2, 8), (4, 4)]
    assert torch.equal(symm_overlap.all_reduce(X, Way.SUM, me.group), symm_overlap.all_reduce(X, "sum", me.group))
    with counted() as seen:
        for _ in range(3):  # true on every rank, but not always a bool
            whole, _ = symm_overlap.all_gather_matmul(X, [B], 0, me.group, return_A=2 if me.rank == 0 else True)
            assert whole is not None
        assert len(seen) == (0 if me.rank == 0 else 3)
    A = torch.ones(16, 32).to(torch.float8_e4m3fn)
    factors, scale = (A, torch.ones(16, 32).to(A.dtype).t()), torch.ones(())
    for _ in range(2):
        for fast in (None, 2, False):
            symm_overlap.scaled_matmul_reduce_scatter(*factors, scale, scale, "sum", 0, me.group, use_fast_accum=fast)
        part = symm_overlap.scaled_matmul_reduce_scatter(*factors, scale, scale, "sum", 0, me.group, out_dtype=15)
        assert part.dtype == torch.bfloat16


@comparing(True)
def is_too_large(me: Rank) -> None:
    """The dispatcher rejects numbers and strings that it cannot represent, and the peers are notified at once."""
    X = torch.ones(2, 4)
    for wrong, right in ((2**63, 0), (-(2**63) - 1, 0)):
        with pytest.raises(TypeError if me.rank == 0 else RuntimeError, match=r"type 'int'|different calls"):
            symm_overlap.all_gather(X, wrong if me.rank == 0 else right, me.group)
        assert symm_overlap.all_gather(X, 0, me.group).shape == (2 * me.world, 4)
    with pytest.raises(TypeError, match="type 'str'"):
        symm_overlap.all_reduce(X, "\ud800", me.group)
    assert torch.equal(symm_overlap.all_reduce(X, "sum", me.group), me.world * X)


def forgets(me: Rank) -> None:
    with mock.patch.object(direct_call, "MOST_KNOWN", 3), counted() as seen:
        for rows in (7, 8, 9, 10, 11):
            for _ in range(2):
                symm_overlap.all_gather_matmul(torch.ones(rows, 4), [torch.ones(4, 5)], 0, me.group)
        assert len(seen) == 10
        assert len(direct_call._unchanged) <= 3


@pytest.mark.parametrize("function", [goes_to_the_kernel, is_seen, is_rejected, is_converted, is_too_large, forgets])
def test_calls_past_the_dispatcher(ranks: Pool, function: Callable[[Rank], None]) -> None:
    ranks.run(2, function)


@pytest.mark.parametrize("arguments", [(), (1, None), ([],)])
def test_without_tensors_it_is_the_dispatcher_that_is_asked(arguments: Any) -> None:
    assert _C.kernel_key(arguments) is None
