"""How torch.compile keeps the ops in the order of the graph: Inductor treats them as collectives.

Inductor reorders operations that do not depend on one another, to use less memory. The order depends on the sizes of
all tensors. These sizes differ between ranks if ranks have different tensors, or if a dynamic size is another
expression on each rank. The ranks would then make their calls in different orders. Inductor keeps only known
collectives in order, so the ops are made known to it as collectives.

This is the private API of torch that the ops use in addition to `symm_overlap._torch`.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from .._torch import tree_map


def keep_in_order(op: Any) -> None:
    """Make Inductor treat ``op`` as a collective, if Inductor is loaded."""
    if "torch._inductor.lowering" in sys.modules:
        _lower(op)


@cache
def _lower(op: Any) -> None:
    from torch._inductor import ir, lowering

    def box(result: Any) -> Any:
        return ir.TensorBox.create(result) if isinstance(result, ir.IRNode) else result

    @lowering.register_lowering(op, type_promotion_kind=None)
    def lower(*args: Any, **kwargs: Any) -> Any:
        return tree_map(box, _kernel().create(op, *args, **kwargs))


@cache
def _kernel() -> Any:
    """Return Inductor's class for a call of an op for which it generates no code."""
    from torch._inductor import ir

    class OverlapKernel(ir._CollectiveKernel):
        pass

    return OverlapKernel
