"""What the pass knows about groups: the devices of their ranks, and their measurements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from symm_overlap import _C, inductor
from symm_overlap._torch import resolve_group
from symm_overlap.collective.choosing.candidates import Candidate
from symm_overlap.collective.choosing.chooser import _choose
from symm_overlap.collective.choosing.tuned import Tuned, keys_of
from symm_overlap.collective.problem import problem
from symm_overlap.inductor.choices import Choices
from symm_overlap.inductor.custom_pass import OverlapPass
from symm_overlap.inductor.groups import choice_in, known_of_groups
from symm_overlap.inductor.report import Site
from symm_overlap.runtime import TRAITS, Device, backend_of, state_of
from symm_overlap.runtime.cuda import memory_operations
from symm_overlap.settings import Settings

from ..collective.test_fake_group import fake_group
from .tracing import overlapped

M, N, K = 8192, 7168, 8192  # predicted to pay on 8 H100, but not on 8 A100


@contextmanager
def gpus(name: str) -> Iterator[None]:
    """Inside this context, the chooser treats CPUs as GPUs with this name."""
    traits = replace(TRAITS["cuda"], device="cpu")
    _choose.cache_clear()
    described = mock.patch.object(type(backend_of("cpu")), "described", return_value=Device(name))
    with mock.patch.dict(TRAITS, cpu=traits), described:
        yield
    _choose.cache_clear()


def graph_of(group: str) -> GraphModule:
    with FakeTensorMode():
        inputs = [torch.empty(size, dtype=torch.bfloat16) for size in ((M // 8, K), (K, N))]
    c10d = torch.ops._c10d_functional

    def program(shard: Tensor, weight: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_gather_into_tensor(shard, 8, group)) @ weight  # type: ignore[no-any-return]

    return make_fx(program)(*inputs)  # type: ignore[no-any-return]


def site_of(group: str) -> Site:
    (site,) = overlapped(graph_of(group))[1].sites
    return site


def measured(times: dict[Candidate, float]) -> dict[tuple[str, str], Tuned]:
    described = problem("all_gather_matmul", M, N, K, torch.bfloat16, 8, "cpu")
    return {("cpu", keys_of(described, None)[1]): Tuned(tuple(times.items()))}


def test_the_device_of_the_graph_decides_until_the_group_knows_those_of_all_ranks() -> None:
    """The prediction uses this rank's device until the group knows the devices of all ranks."""
    with fake_group(8) as group:
        state = state_of(resolve_group(group))
        with gpus("NVIDIA H100 80GB HBM3"):
            assert (site_of(group).path, site_of(group).matmuls) == ("pipelined", 1)
            state.devices["cpu"] = (Device("NVIDIA A100-SXM4-80GB"), *[Device("NVIDIA H100")] * 7)
            assert "small: predicted" in site_of(group).reason
        state.devices.clear()
        with gpus("NVIDIA A100-SXM4-80GB"):
            assert "small: predicted" in site_of(group).reason


def test_what_the_group_has_measured_goes_before_what_is_predicted() -> None:
    """Measurements of the group take precedence over predictions."""
    with fake_group(8) as group, gpus("NVIDIA H100"):
        state = state_of(resolve_group(group))
        state.tuned.update(measured({Candidate("sequential", 1): 1.0, Candidate("pipelined", 1): 2.0}))
        assert "small: measured by autotune: sequential 1.000 ms" in site_of(group).reason
        state.tuned.update(measured({Candidate("sequential", 1): 1.0, Candidate("fused", 2): 0.5}))
        assert site_of(group).path == "fused"


@pytest.mark.parametrize("how", ["measured", "device", "waits"])
def test_the_key_of_cached_graphs_depends_on_what_is_known(how: str) -> None:
    """The cache key changes if the group's measurements change, or if ranks have other devices than this rank."""
    with fake_group(8) as group, gpus("NVIDIA H100"):
        state, custom_pass = state_of(resolve_group(group)), OverlapPass(Choices())
        key = custom_pass.uuid()
        assert custom_pass.uuid() == key
        if how == "measured":
            state.tuned.update(measured({Candidate("sequential", 1): 1.0}))
        else:
            state.devices["cpu"] = (Device("NVIDIA H100"),) * 8
            assert custom_pass.uuid() == key
            other = Device("NVIDIA A100") if how == "device" else Device("NVIDIA H100", stream_waits=False)
            state.devices["cpu"] = (other, *[Device(other.name)] * 7)
        assert custom_pass.uuid() != key


H100, A100 = "NVIDIA H100", "NVIDIA A100"


KERNELS = str(Device(H100, stream_waits=False))


@pytest.mark.parametrize(
    ("names", "contexts", "with_cuda", "known"),
    [
        ([H100] * 4, [3], True, H100),
        ([H100] * 4, [], True, H100),  # tensors on CPUs alone
        ([H100] * 4, [3], False, KERNELS),
        ([H100] * 4, [], False, KERNELS),
        ([H100] * 4, [0, 3], True, str([KERNELS, H100, H100, H100])),
        ([H100, A100], [], True, str([H100, A100])),
        ([], [], True, "[]"),
    ],
)
def test_gpus_are_asked_until_the_group_knows_those_of_all_ranks_and_no_context_is_made(
    monkeypatch: pytest.MonkeyPatch, names: list[str], contexts: list[int], with_cuda: bool, known: str
) -> None:
    """The GPUs of this process are queried until the group knows the devices of all ranks. No CUDA context is created.

    Memory operations are tested only on GPUs with a context. Here, only GPU 3 has memory operations.
    """

    def has_memory_operations(device: int) -> bool:
        assert type(device) is int, f"the binding does not accept {device!r}"
        assert device in contexts, "this test would create a context"
        return device == 3

    for name, value in {
        "is_available": lambda: bool(names),
        "device_count": lambda: len(names),
        "get_device_properties": lambda device: SimpleNamespace(name=names[device.index]),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(memory_operations, "has_context", contexts.__contains__)
    monkeypatch.setattr(memory_operations, "_may_pin", contexts.__contains__)
    monkeypatch.setattr(_C, "with_cuda", with_cuda)
    if with_cuda:
        monkeypatch.setattr(_C, "has_memory_operations", has_memory_operations, raising=False)
    else:  # as if the package was compiled for CPUs only
        monkeypatch.delattr(_C, "has_memory_operations", raising=False)
    monkeypatch.delenv("SYMM_OVERLAP_STREAM_WAITS", raising=False)
    memory_operations._has_memory_operations.cache_clear()
    try:
        with fake_group(8) as group:
            assert known_of_groups() == (f"{group} of 8 ranks: {[known]}, []",)
            described = problem("all_gather_matmul", M, N, K, torch.bfloat16, 8, "cuda")
            for index in range(len(names)):  # for any GPU
                assert choice_in(group, described, Settings(), torch.device("cuda", index)).predictions
            state_of(resolve_group(group)).devices["cuda"] = (Device("NVIDIA B200"),) * 8
            assert known_of_groups() == (f"{group} of 8 ranks: {['NVIDIA B200']}, []",)
    finally:
        memory_operations._has_memory_operations.cache_clear()


def test_graphs_do_not_depend_on_measurements_of_a_rank() -> None:
    """On GPUs, Inductor measures whether padding a matmul pays off, and the pass would find other matmuls."""
    config: Any = torch._inductor.config
    assert config.shape_padding
    assert inductor.options()["shape_padding"] is False
    with inductor.enabled():
        assert not config.shape_padding
    assert config.shape_padding
    inductor.enable()
    inductor.enable(strict=True)
    assert not config.shape_padding
    inductor.disable()
    assert config.shape_padding
    with config.patch(shape_padding=False):
        inductor.enable()
        inductor.disable()
        assert not config.shape_padding, "what the program had chosen is back"
