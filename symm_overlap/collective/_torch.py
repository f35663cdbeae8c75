"""How torch.compile keeps the ops in the order of the graph: Inductor treats them as collectives.

Inductor reorders operations that do not depend on one another, to use less memory. The order depends on the sizes of
all tensors. These sizes differ between ranks if ranks have different tensors, or if a dynamic size is another
expression on each rank. The ranks would then make their calls in different orders. Inductor keeps only known
collectives in order, so the ops are made known to it as collectives.

This is the private API of torch that the ops use in addition to `symm_overlap._torch`. Checked on torch
2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
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
        kernel = _kernel()
        # As with torch's own collectives, one tensor is the buffer of the call itself. If it were an item of the call's
        # results, Inductor would fail on a collective that changes it in place, as the second of two all-reduces does.
        create = kernel.create_out_of_place if _returns_one_tensor(op) else kernel.create
        return tree_map(box, create(op, *args, **kwargs))


def _returns_one_tensor(op: Any) -> bool:
    returns = op._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


@cache
def _kernel() -> Any:
    """Return Inductor's class for a call of an op for which it generates no code."""
    from torch._inductor import ir

    class OverlapKernel(ir._CollectiveKernel):
        # If an op has several results, Inductor takes the wait for a collective that changes result i in place for a
        # wait for the op, which could still read argument i. The ops may have more results than arguments. They read
        # nothing after they have returned, so any argument will do.
        def __post_init__(self) -> None:
            super().__post_init__()
            self.inputs = _Arguments(self.inputs)

        # To estimate how long a collective takes on a GPU, Inductor expects the group's name as the last constant.
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            texts = [each for each in self.constant_args if isinstance(each, str)]
            op: Any = self.op_overload
            names = [each.name for each in op._schema.arguments if str(each.type) == "str"]
            self.constant_args = _Constants(self.constant_args, texts[names.index("group_name")])

    return OverlapKernel


class _Constants(tuple[Any, ...]):
    """A tuple in which the index -1 means another item than the last one."""

    _other: Any

    def __new__(cls, items: Iterable[Any], other: Any) -> _Constants:
        self = super().__new__(cls, items)
        self._other = other
        return self

    def __getitem__(self, index: Any) -> Any:
        return self._other if index == -1 else super().__getitem__(index)


class _Arguments(list[Any]):
    """A list in which numbers beyond the end mean the first item."""

    def __getitem__(self, index: Any) -> Any:
        beyond = isinstance(index, int) and index >= len(self)
        return super().__getitem__(0 if beyond else index)
