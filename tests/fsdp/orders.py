"""Write the order of a step plan in the words of the log of a real run."""

from __future__ import annotations

from symm_overlap.fsdp.prefetch.issue_order import Prefetch
from symm_overlap.fsdp.prefetch.step_plan import step_plan
from symm_overlap.fsdp.prefetch.trace import Trace
from tests.fsdp.models import Log

KINDS = ("gather", "copy-out", "forward", "reshard", "backward", "reduce-scatter")


def plan_order(trace: Trace, prefetch: Prefetch) -> Log:
    """Return the steps of the plan as a log. The root's own compute is left out, because the log of a run has none.
    The compute of a block counts once, also if hooks of torch on other modules split it into several steps."""
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
    """Return a log as one line."""
    return ", ".join(f"{kind} {name}" for kind, name in log if kind in kinds)
