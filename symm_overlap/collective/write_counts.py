"""Notice that a parameter which is a DTensor was written to between the forward and the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from .._torch import compiling


def counted(local: Tensor, parameter: Tensor) -> Tensor:
    """Return ``local``, this rank's part of a parameter, such that writes to the parameter count.

    torch counts a write to a DTensor, such as an optimizer's, at the DTensor and not at its local part. The result
    counts with the DTensor. So if an op keeps it for its backward pass, and the parameter is written to before, torch
    raises its error. (Compiled code does not: torch does not check what custom autograd functions keep there.)
    """
    if (
        compiling()
        or not torch.is_grad_enabled()  # nothing is kept, and torch returns the parameter's own local part
        or type(local) is not Tensor
        or local.is_inference()
        or parameter.is_inference()
    ):
        return local
    return _C.counting_writes_to(local, parameter)
