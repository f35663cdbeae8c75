"""The order that the step plan has, in the words of the log of a real run."""

from __future__ import annotations

from symm_overlap.fsdp.prefetch.issue_order import Prefetch
from symm_overlap.fsdp.prefetch.step_plan import step_plan
from symm_overlap.fsdp.prefetch.trace import Trace
from tests.fsdp.models import Log

KINDS = ("gather", "copy-out", "forward", "reshard", "backward", "reduce-scatter")


def plan_order(trace: Trace, prefetch: Prefetch) -> Log:
    """The steps of the plan. What the root itself computes is left out, since it is not in the log; what a block
    computes counts once, also where torch's hooks on others come in between."""
    names = ["L" + layer.name.rpartition(".")[2] if layer.name else "root" for layer in trace.layers]
    found: Log = []
    for step in step_plan(trace, prefetch).plan.steps:
        if step.kind not in KINDS or step.chunk is None:
            continue
        entry = (step.kind, names[step.chunk[0]])
        if [entry] == found[-1:] or (step.kind in ("forward", "backward") and entry[1] == "root"):
            continue
        found.append(entry)
    return found


def words(log: Log, kinds: tuple[str, ...] = KINDS) -> str:
    """A log in one line."""
    return ", ".join(f"{kind} {name}" for kind, name in log if kind in kinds)
