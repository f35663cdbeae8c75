"""How torch.compile keeps the ops in the order of the graph: Inductor takes them for collectives.

Inductor moves operations that do not depend on one another, to use less memory. It weighs the sizes of all tensors,
which differ between ranks where each has tensors of its own, or where a dynamic size is another expression on every
rank: they would make different calls. Only collectives that it knows stay in order, and among them these ops.

This is the private API of torch that the ops use, besides that of `symm_overlap._torch`.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from .._torch import tree_map


def keep_in_order(op: Any) -> None:
    """Let Inductor take ``op`` for a collective, if it is loaded."""
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
    """A call of an op, for which Inductor has no code of its own."""
    from torch._inductor import ir

    class OverlapKernel(ir._CollectiveKernel):
        pass

    return OverlapKernel
