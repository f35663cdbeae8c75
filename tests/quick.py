"""Which cases of a parametrised test are quick tests. `make test` has to stay short; `make test-slow` runs the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, cases: Iterable[Any], first: int = 0) -> list[Any]:
    """Return the cases for ``pytest.mark.parametrize``, with all but one in ``count`` of them marked as slow and alike.

    Args:
        cases: the cases. A tuple has a value for each argument of the test.
        first: the index of the first case that is quick.
    """
    return [case if (number - first) % count == 0 else _slow(case) for number, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    marks = [pytest.mark.slow, pytest.mark.alike]
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=[*case.marks, *marks], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
