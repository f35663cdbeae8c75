"""What an activity does: from the step that launched it if that is known, else from its name."""

from __future__ import annotations

import re

from ..collective.problem import Problem
from ..plan import Step, kind
from ..plan.kinds import find

_FLAGS = ("raise", "poll")  # kinds of steps of the fused path that only set and await flags

_OURS = (
    (re.compile(r"symm_overlap::cuda\b.*\b(?:reduce|meet_and_sum)_kernel"), "sum"),
    (re.compile(r"symm_overlap::cuda\b.*\b(?:await_and_gather|pace)_kernel"), "copy"),
    (re.compile(r"symm_overlap::cuda\b.*\b(?:signal|write|wait|barrier|raise_flag|await_flag)_kernel"), "meet"),
    (re.compile(r"symm_overlap::cuda\b"), "other"),  # the end of a call, and the sleep
)
_LIBRARIES = (
    (re.compile(r"nccl|rccl", re.IGNORECASE), "collective"),
    # torch's own kernels on symmetric memory
    (re.compile(r"one_shot_all_|two_shot_all_|multimem_|all_to_all_v"), "collective"),
    (re.compile(r"(?:barrier|put_signal|wait_signal)_kernel"), "meet"),
    (re.compile(r"Memcpy.*(?:PtoP|P2P|Peer)", re.IGNORECASE), "copy"),
    (re.compile(r"^\[?(?:CUDA )?mem(?:cpy|set)\b", re.IGNORECASE), "other"),
    (re.compile(r"^Copy(?:Host|Device)To|^hipMem|FillBuffer"), "other"),
)


def role_of(name: str, step: Step | None, problem: Problem | None) -> str:
    """Return the role of an activity, one of `symm_overlap.profile.recording.ROLES`.

    Args:
        name: the profiler's name for the activity.
        step: the step that launched it, if that is known.
        problem: the call that launched it, if that is known.
    """
    if step is not None and find(step.kind) is not None:
        return _role_of_step(step, problem)
    for pattern, role in _OURS + _LIBRARIES:
        if pattern.search(name):
            copies = problem is not None and role == "other" and "memcpy" in name.lower()
            return "copy" if copies else role
    return "compute"


def _role_of_step(step: Step, problem: Problem | None) -> str:
    record = kind(step.kind)
    if record.overhead:
        return "sum"
    if record.role == "compute":  # an op without a matmul "produces" by copying
        return "compute" if problem is None or problem.op_kind.multiplies else "copy"
    if step.kind in _FLAGS:
        return "meet"
    return "other" if record.role == "order" else record.role
