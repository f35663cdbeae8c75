"""The loss of a step on every rank, although only the rank of the last stage has computed it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..runtime.exchange import wait_for_all

_DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16


def on_all_ranks(
    loss: Tensor | None, group: dist.ProcessGroup | None, source: int, parameters: Iterable[nn.Parameter]
) -> Tensor:
    """Return the loss that rank ``source`` of the group has, in its dtype, on the device of this rank's parameters."""
    device = next((parameter.device for parameter in parameters), None)  # one that the group can send from
    numbers = [0.0, 0.0] if loss is None else [loss.item(), _DTYPES.index(loss.dtype)]
    said = torch.tensor(numbers, dtype=torch.float64, device=device)
    work = dist.broadcast(said, group=group, group_src=source, async_op=True)
    wait_for_all(work, group, said.device, "the loss on all ranks")
    return said[0].to(_DTYPES[int(said[1])])
