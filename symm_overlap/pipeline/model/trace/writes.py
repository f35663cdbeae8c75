"""Which arguments an operator writes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._torch import OpOverload

STATISTICS = ("running_mean", "running_var")
_IF = ("training", "train", "use_input_stats")


def arguments(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, bool, bool]]:
    """Return for each argument: its value, whether results may share memory with it, and whether it is written to.

    Norms write running statistics if they use the batch's own ones, which their schemas do not say.
    """
    names = [argument.name for argument in operator._schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    learns = any(values.get(name) for name in _IF)
    found = []
    for argument in operator._schema.arguments:
        alias = argument.alias_info
        written = (alias is not None and alias.is_write) or (argument.name in STATISTICS and learns)
        found.append((values.get(argument.name), alias is not None, written))
    return found
