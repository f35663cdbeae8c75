"""What an activity does is told by its step, and without a step by its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import symm_overlap
from symm_overlap.collective.problem import problem
from symm_overlap.plan import Step
from symm_overlap.plan.ranges import range_of
from symm_overlap.profile.roles import role_of

OURS = "void symm_overlap::cuda::(anonymous namespace)::{}(symm_overlap::cuda::Lane, unsigned int)"
MATMUL, SUM = (problem(op, 64, 32, 16, torch.float32, 2, "cuda") for op in ("all_gather_matmul", "all_reduce"))


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "collective"),
        ("void rcclGenericKernel<1, false>(ncclDevComm*)", "collective"),
        ("void one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(...)", "collective"),
        ("nvshmemi_transfer_rma_block", "collective"),
        ("void c10d::symmetric_memory::allToAllV(...)", "collective"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(...)", "collective"),
        ("void deep_ep::internode::dispatch<...>(...)", "collective"),
        ("void multimem_all_gather_kernel<16>(char*, char*, ...)", "collective"),
        ("c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)", "meet"),
        ("Memcpy PtoP (Device -> Device)", "copy"),
        ("Memcpy DtoD (Device -> Device)", "other"),
        ("Memcpy HtoD (Pinned -> Device)", "other"),
        ("Memset (Device)", "other"),
        ("CopyDeviceToHost", "other"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "compute"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(...)", "compute"),
        ("triton_poi_fused_memset_like_0", "compute"),
    ],
)
def test_the_role_of_what_others_launch_is_told_by_its_name(name: str, role: str) -> None:
    assert role_of(name, None, None) == role


@pytest.mark.parametrize(
    ("kernel", "role"),
    {
        "reduce_kernel": "sum",
        "meet_and_sum_kernel": "sum",
        "await_and_gather_kernel": "copy",
        "pace_kernel": "copy",
        "signal_kernel": "meet",
        "write_kernel": "meet",
        "wait_kernel": "meet",
        "barrier_kernel": "meet",
        "raise_flag_kernel": "meet",
        "await_flag_kernel": "meet",
        "poison_kernel": "other",
        "sleep_kernel": "other",
        "give_up_kernel": "other",
        "give_up_flags_kernel": "other",
        "stamp_kernel": "other",
    }.items(),
)
def test_every_kernel_of_ours_has_a_role(kernel: str, role: str) -> None:
    assert role_of(OURS.format(kernel), None, None) == role


def test_the_list_of_our_kernels_is_complete() -> None:
    source = Path(symm_overlap.__file__).parents[1] / "csrc" / "cuda"
    found = {
        name for path in source.glob("*.cu*") for name in re.findall(r"\b(?!load_)(\w+_kernel)\(", path.read_text())
    }
    (parameters,) = test_every_kernel_of_ours_has_a_role.pytestmark  # type: ignore[attr-defined]
    assert found == {kernel for kernel, _ in parameters.args[1]}


@pytest.mark.parametrize(
    ("kind", "role"),
    {
        "consume": "compute",
        "produce": "compute",
        "tiles": "compute",
        "reduce": "sum",
        "publish": "copy",
        "pull": "copy",
        "push": "copy",
        "signal": "meet",
        "wait": "meet",
        "barrier": "meet",
        "raise": "meet",
        "poll": "meet",
        "sleep": "other",
        "announce": "other",
    }.items(),
)
def test_a_step_decides_whatever_the_activity_is_called(kind: str, role: str) -> None:
    assert role_of("ncclDevKernel_AllReduce", Step(kind, "copy"), MATMUL) == role


def test_an_op_without_a_matmul_produces_by_copying() -> None:
    assert role_of("a kernel", Step("produce", "compute0"), SUM) == "copy"


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("gemm", "compute"),
        ("ncclDevKernel_AllReduce", "collective"),
        ("Memcpy HtoD (Pinned -> Device)", "other"),
        ("Memcpy PtoP (Device -> Device)", "copy"),
        (range_of(Step("F", "compute", chunk=(0, 0))), "compute"),
    ],
)
def test_a_forward_of_a_pipeline_runs_any_code(name: str, role: str) -> None:
    assert role_of(name, Step("F", "compute", chunk=(0, 0)), None) == role


def test_a_send_of_a_pipeline_copies_and_signals() -> None:
    send = Step("SEND_F", "compute", peers=(1,))
    assert role_of("Memcpy PtoP (Device -> Device)", send, None) == "copy"
    assert role_of(OURS.format("signal_kernel"), send, None) == "meet"
    assert (
        role_of(range_of(Step("RECV_B", "compute", peers=(1,))), Step("RECV_B", "compute", peers=(1,)), None) == "meet"
    )


def test_a_step_of_an_unknown_kind_on_a_cpu_is_not_compute() -> None:
    step = Step("of another version", "compute")
    assert role_of(range_of(step), step, None) == "other"


def test_within_a_call_of_ours_a_copy_on_the_device_is_a_copy() -> None:
    assert role_of("Memcpy DtoD (Device -> Device)", None, MATMUL) == "copy"
    assert role_of("Memset (Device)", None, MATMUL) == "other"


def test_a_step_of_an_unknown_kind_is_told_by_its_name() -> None:
    assert role_of("ncclDevKernel_AllGather", Step("of another library", "copy"), None) == "collective"
