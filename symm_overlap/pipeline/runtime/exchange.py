"""What ranks of a pipeline tell each other besides messages of steps, within the deadline of `symm_overlap.timeout`."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ... import _C
from ...runtime import are_enqueued, state_of
from ...settings import current


def said_by_all(group: dist.ProcessGroup | None, purpose: str, mine: str) -> list[str]:
    """Return the text that each rank of the group says for this purpose, by rank. Collective.

    Raises:
        torch.distributed.DistBackendError: a rank has died, or did not come before the deadline.
    """
    found = group or dist.group.WORLD
    assert found is not None
    if state_of(found).alone:
        return [mine]
    return _C.exchange(found.group_name, purpose, mine)


def wait_for_all(work: dist.Work | None, group: dist.ProcessGroup | None, device: torch.device, what: str) -> None:
    """Wait for a collective. If it is enqueued on a GPU, only the current stream waits, without a deadline.

    Raises:
        torch.distributed.DistBackendError: a rank has ended, or did not come before the deadline.
    """
    if work is None:
        return
    found = group or dist.group.WORLD
    assert found is not None
    if are_enqueued(found, device):
        work.wait()
        return
    seconds = current().seconds
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise dist.DistBackendError(
            f"{what}: a rank of the pipeline has ended, or did not come within {seconds:g} s ({why})"
        ) from None
