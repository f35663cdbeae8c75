"""The private APIs of torch that only the pass uses. Checked on torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0; those
about expressions of symbolic sizes were read in 2.15.0.

They are not in `symm_overlap._torch`, because importing the compiler takes seconds.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.utils import counters as _counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import inductor_prims
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.distributed import distributed_c10d as _c10d
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, statically_known_true
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Mod, PythonMod

__all__ = [
    "FORCE_STRIDES",
    "CustomGraphPass",
    "GuardOnDataDependentSymNode",
    "ShortenTraceback",
    "arithmetic",
    "auto_functionalized",
    "configured_pass",
    "counters",
    "expression_of",
    "get_hash_for_files",
    "groups",
    "is_inner_graph",
    "known",
    "options_of",
    "pads",
    "plain_size",
    "run_after_compilations",
    "set_pass",
    "stable_topological_sort",
    "tree_leaves",
    "with_pass",
]

auto_functionalized = torch.ops.higher_order.auto_functionalized_v2
"""The node that stands in a graph for an op that writes into its arguments. It returns the new arguments."""

FORCE_STRIDES = inductor_prims.force_stride_order
"""It returns a tensor that has the given strides in memory, and may be the tensor itself."""

PASS_OPTION = "post_grad_custom_pre_pass"
"""Inductor's option for a custom pass that runs on graphs after autograd and before Inductor's own passes."""

AnyPass = Callable[[Graph], Any]


_PADDING = "shape_padding"
"""Inductor's option for padding the sizes of matmuls on GPUs. Inductor does so before the pass, which would then find
padded matmuls. It also decides by a measurement on each rank, so the graphs of the ranks may differ.
"""


def options_of(custom_pass: AnyPass) -> dict[str, Any]:
    """Return Inductor's options for the pass."""
    return {PASS_OPTION: custom_pass, _PADDING: False}


def configured_pass() -> AnyPass | None:
    """Return the pass that is set for the whole program, or None."""
    found: AnyPass | None = getattr(inductor_config, PASS_OPTION)
    return found


def pads() -> bool:
    """Return whether Inductor may pad matmuls in the whole program."""
    return bool(getattr(inductor_config, _PADDING))


def set_pass(custom_pass: AnyPass | None, *, padding: bool = False) -> None:
    """Set the pass, and whether Inductor may pad matmuls, for the whole program."""
    setattr(inductor_config, PASS_OPTION, custom_pass)
    setattr(inductor_config, _PADDING, padding)


@contextmanager
def with_pass(custom_pass: AnyPass) -> Iterator[None]:
    """Set the pass for everything that is compiled inside the block.

    The second setting compiles backward graphs inside the block too. Without it the first ``backward()`` compiles them,
    perhaps after the block. The third one avoids a defect of torch (2.13): the keys of autograd's cache do not tell
    whether a DTensor holds the result of a collective that is still running. If the backward graph of one layer is in
    the cache before the next layer is compiled, the next one may get a graph for other inputs. Inductor's own cache
    stays.
    """
    with (
        inductor_config.patch(options_of(custom_pass)),
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
    ):
        yield


def known(condition: bool | torch.SymBool) -> bool:
    """True if a condition on sizes holds for all values of symbolic sizes that torch's assumptions (guards) admit. Adds
    no assumption.
    """
    if isinstance(condition, bool):
        return condition
    return statically_known_true(condition) or _known_by_division(condition)


def _known_by_division(condition: torch.SymBool) -> bool:
    """Like `known`, for conditions with quotients if guards say that nothing remains, such as ``s // 2 * 2 == s``.

    From such a guard, torch itself concludes ``s % 2 == 0``, but nothing about quotients and products.
    """
    env, expression = condition.node.shape_env, condition.node.expr

    def divisible(dividend: sympy.Expr, divisor: sympy.Expr) -> bool:
        factors = [abs(factor) if factor.is_number else factor for factor in sympy.Mul.make_args(dividend)]
        return bool(divisor.is_positive) and any(  # Mod raises an error for negative numbers
            factor.is_nonnegative and statically_known_true(env.create_symboolnode(sympy.Eq(Mod(factor, divisor), 0)))
            for factor in factors
        )

    exact: dict[sympy.Expr, sympy.Expr] = {}
    for quotient in expression.atoms(FloorDiv):
        dividend, divisor = quotient.args
        rest, whole = dividend.as_coeff_Add() if divisor.is_Integer else (sympy.S.Zero, dividend)
        if divisible(whole, divisor):  # torch.chunk rounds up: (s + 1) // 2 is also s / 2
            exact[quotient] = whole / divisor + rest // divisor
    exact |= {each: sympy.S.Zero for each in expression.atoms(Mod, PythonMod) if divisible(*each.args)}
    if not exact or not isinstance(expression, sympy.Rel):
        return False

    def replaced(part: sympy.Expr) -> sympy.Expr:
        """Replace quotients in sums and products. Inside another quotient, a fraction would make no sense."""
        if part in exact:
            return replaced(exact[part])
        return part.func(*map(replaced, part.args)) if isinstance(part, (sympy.Add, sympy.Mul)) else part

    # torch cannot evaluate fractions, but in equations of sizes they cancel.
    difference = sympy.expand(replaced(expression.lhs - expression.rhs))
    return bool(difference.is_number and expression.func(difference, 0))


def arithmetic(expression: sympy.Expr) -> tuple[Callable[[Any, Any], Any], Sequence[sympy.Expr]] | None:
    """Return the operator that computes an expression of sizes, and its operands, from left to right. None if it is
    another function.
    """
    if isinstance(expression, sympy.Pow) and expression.exp.is_Integer and expression.exp > 1:
        return operator.mul, [expression.base] * int(expression.exp)
    found = _OPERATORS.get(expression.func)
    return None if found is None else (found, expression.args)


_OPERATORS: dict[Any, Callable[[Any, Any], Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
    CleanDiv: operator.floordiv,
}


def expression_of(size: torch.SymInt) -> sympy.Expr:
    """Return the expression that a symbolic size is."""
    return size.node.expr


def plain_size(size: Any) -> Any:
    """Return a symbolic size as an int if it is a number after all: ``16 * s // s`` is 16. Adds no assumption."""
    if isinstance(size, int):
        return size
    found: int | None = size.node.maybe_as_int()
    return size if found is None else found


def groups() -> dict[str, _c10d.ProcessGroup]:
    """Return every group of this process, by its name."""
    return {str(name): group for group, name in _c10d._world.pg_names.items()}


def is_inner_graph() -> bool:
    """True if the pass is running on a region or a branch of another graph. Only torch's stack shows it."""
    frame, depth = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        depth += frame.f_code.co_name == "_recursive_post_grad_passes"
    return depth > 1


def counters() -> Counter[str]:
    """Return Inductor's counters. If a graph comes from a cache, torch adds again what its compilation had added."""
    return _counters["inductor"]


def run_after_compilations(function: Callable[[Any], None]) -> None:
    """Call the function after every compilation and every cache hit, until dynamo is reset."""
    if function not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(function)
