"""The private APIs of torch.distributed.pipelining. Checked on torch 2.11.0, 2.13.0 and 2.15.0.

Nothing but the conversions imports this file, since schedules need no torch.
"""

from __future__ import annotations

from torch.distributed.pipelining.schedules import _Action as TorchAction
from torch.distributed.pipelining.schedules import _ComputationType as TorchKind

__all__ = ["TorchAction", "TorchKind"]
