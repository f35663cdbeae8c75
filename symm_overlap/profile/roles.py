"""What an activity does: from the step that launched it if that is known, else from its name."""

from __future__ import annotations

import re
from functools import lru_cache

from ..collective.problem import Problem
from ..pipeline import kinds as _pipelines  # registers the kinds of the steps of pipelines
from ..plan import Step
from ..plan.kinds import find
from ..plan.ranges import STEP

assert _pipelines  # imported for what it registers

_FLAGS = ("raise", "poll")  # kinds of steps of the fused path that only set and await flags

WHOLE_GRAPH = "memory operations and kernels of a CUDA graph"
"""The name of a replay of a CUDA graph whose kernels are not known."""

_BY_NAME = (
    (re.compile(f"^{WHOLE_GRAPH}$"), "other"),
    (re.compile(r"symm_overlap::cuda\b.*\b(?:reduce|meet_and_sum)_kernel"), "sum"),
    (re.compile(r"symm_overlap::cuda\b.*\b(?:await_and_gather|pace)_kernel"), "copy"),
    (re.compile(r"symm_overlap::cuda\b.*\b(?:signal|write|wait|barrier|raise_flag|await_flag)_kernel"), "meet"),
    (re.compile(r"symm_overlap::cuda\b"), "other"),  # the end of a call, and the sleep
    (re.compile(r"nccl|rccl|nvshmem|mscclpp|deep_ep", re.IGNORECASE), "collective"),
    # torch's own kernels on symmetric memory, and those of inference engines
    (
        re.compile(r"one_shot_all_|two_shot_all_|multimem_|all_?to_?all_?v|cross_device_reduce", re.IGNORECASE),
        "collective",
    ),
    (re.compile(r"(?:barrier|put_signal|wait_signal)_kernel"), "meet"),
    (re.compile(r"Memcpy.*(?:PtoP|P2P|Peer)", re.IGNORECASE), "copy"),
    (re.compile(r"^\[?(?:CUDA )?mem(?:cpy|set)\b", re.IGNORECASE), "other"),
    (re.compile(r"^Copy(?:Host|Device)To|^hipMem|FillBuffer"), "other"),
)


def role_of(name: str, step: Step | None, problem: Problem | None) -> str:
    """Return the role of an activity, one of `symm_overlap.profile.recording.ROLES`.

    In a call of an op, the step alone decides. A step of a pipeline that computes runs any code, such as a collective
    of another library, so the names of its activities decide, too.

    Args:
        name: the profiler's name for the activity; on a CPU, the name of the step's range.
        step: the step that launched it, if that is known.
        problem: the call of an op that launched it, if it is one.
    """
    record = None if step is None else find(step.kind)
    if step is None or record is None:
        role = "other" if name.startswith(STEP) else _by_name(name)
        return "copy" if problem is not None and role == "other" and _is_copy(name) else role
    if record.overhead:
        return "sum"
    if record.role == "compute":
        if problem is None:
            return "compute" if name.startswith(STEP) else _by_name(name)
        return "compute" if problem.op_kind.multiplies else "copy"  # without a matmul, it "produces" by copying
    if record.role == "meet" and _is_copy(name):
        return "copy"  # a send or a receive of a pipeline
    if step.kind in _FLAGS:
        return "meet"
    return "other" if record.role == "order" else record.role


@lru_cache(maxsize=1 << 16)
def _by_name(name: str) -> str:
    return next((role for pattern, role in _BY_NAME if pattern.search(name)), "compute")


def _is_copy(name: str) -> bool:
    return name.lower().startswith(("memcpy", "[cuda memcpy"))
