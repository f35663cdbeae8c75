"""Tables and verdicts: a loss is shown as a loss, and a figure on the wrong side of its limit is a missed target."""

from __future__ import annotations

from typing import Any

import pytest

from bench.harness.report import baseline, bound_ms, case_table, grouped
from bench.harness.targets import means, memory_verdicts, speed_verdicts

TITLES = {name: name for name in ("matmul", "copies", "plain", "plain_allocating", "ours", "ours_no_gathered", "torch")}


def row(method: str, ms: float | None, op: str = "all_gather_matmul", m: int = 2048, **more: Any) -> dict[str, Any]:
    return {
        "op": op,
        "m": m,
        "n": 256,
        "k": 64,
        "dtype": "float32",
        "world": 2,
        "method": method,
        "median_ms": ms,
        **more,
    }


def test_baseline_is_the_quicker_plain_row() -> None:
    (case,) = grouped([row("plain", 3.0), row("plain_allocating", 2.0), row("matmul", 1.0)]).values()
    assert baseline(case) == 2.0


def test_the_bound_follows_its_formula() -> None:
    assert bound_ms(10.0, 4.0, 2) == 12.0
    assert bound_ms(4.0, 10.0, 4) == 11.0


def test_table_marks_a_loss_and_gives_reasons() -> None:
    rows = [row("plain", 2.0), row("ours", 3.0), row("torch", None, reason="no kernel here")]
    text = case_table({one["method"]: one for one in rows}, TITLES)
    assert "1.500" in text
    assert "slower than plain" in text
    assert "not available: no kernel here" in text


def test_table_shouts_when_a_result_is_wrong() -> None:
    wrong = row("ours", 1.0, ok=False, exact=False, relative_error=0.5, error_bound=1e-6, detail="rank 1: output[0, 0]")
    assert "WRONG: rank 1: output[0, 0]" in case_table({"ours": wrong}, TITLES)


def verdict(rows: list[dict[str, Any]], target: str) -> tuple[float, bool]:
    (found,) = [one for one in speed_verdicts(rows) if one.target == target]
    return round(found.figure, 6), found.met


def test_worst_shape_and_mean_over_both_ops_are_judged() -> None:
    rows = [row("plain", 2.0), row("ours", 2.2)]
    rows += [row("plain", 2.0, "matmul_reduce_scatter"), row("ours", 1.0, "matmul_reduce_scatter")]
    assert verdict(rows, "AG and RS, return_A=True, torch's matmul: ours / plain, worst") == (1.1, False)
    assert verdict(rows, "AG and RS, return_A=True, torch's matmul: ours / plain, geometric mean") == (
        round((1.1 * 0.5) ** 0.5, 6),
        True,
    )


def test_means_are_geometric_and_over_cases_that_have_all_three() -> None:
    rows = [row("matmul", 1.0), row("plain", 2.0), row("ours", 1.5)]
    rows += [row(name, ms, "matmul_reduce_scatter") for name, ms in (("matmul", 4.0), ("plain", 4.0), ("ours", 6.0))]
    rows += [row("plain", 2.0, m=64), row("ours", 9.0, m=64)]
    found, *_ = means(rows)
    assert (found.group, found.base, found.cases) == ("AG and RS, return_A=True", "torch's matmul", 2)
    assert found.matmul_over_plain == pytest.approx(0.5**0.5)
    assert found.ours_over_plain == pytest.approx((0.75 * 1.5) ** 0.5)
    assert found.ours_over_matmul == pytest.approx(1.5)
    assert means(rows[:2]) == []


def test_ours_is_judged_against_its_own_matmul_too() -> None:
    rows = [row("matmul", 2.0), row("plain", 3.0), row("matmul_of_ours", 1.0), row("plain_of_ours", 2.0)]
    rows.append(row("ours", 1.5))
    assert verdict(rows, "AG and RS, return_A=True, torch's matmul: ours / plain, worst") == (0.5, True)
    assert verdict(rows, "AG and RS, return_A=True, the same matmul: ours / plain, worst") == (0.75, True)
    limit = "ours / matmul, worst at >= 512 rows"
    assert verdict(rows, f"AG and RS, return_A=True, torch's matmul: {limit}") == (0.75, True)
    assert verdict(rows, f"AG and RS, return_A=True, the same matmul: {limit}") == (1.5, False)
    assert [(one.base, one.ours_over_matmul) for one in means(rows)] == [
        ("torch's matmul", 0.75),
        ("the same matmul", 1.5),
    ]
    text = case_table({one["method"]: one for one in rows}, {one["method"]: one["method"] for one in rows})
    (ours,) = [line.split() for line in text.splitlines() if line.split()[0] == "ours"]
    assert ours[1:5] == ["1.500", "0.500", "1.500", "0.500"], "exposed time counts from the quicker matmul"


def test_not_returning_a_is_judged_apart() -> None:
    """Calls that do not return the gathered tensor have separate verdicts."""
    rows = [row("plain", 2.0), row("ours", 2.2), row("ours_no_gathered", 1.0)]
    assert verdict(rows, "AG and RS, return_A=False, torch's matmul: ours / plain, worst") == (0.5, True)
    assert verdict(rows, "AG and RS, return_A=True, torch's matmul: ours / plain, worst") == (1.1, False)


@pytest.mark.parametrize(("m", "judged"), [(1024, True), (1022, False)])
def test_matmul_target_holds_from_512_rows_a_rank(m: int, judged: bool) -> None:
    rows = [row("matmul", 1.0, m=m), row("plain", 2.0, m=m), row("ours", 1.2, m=m)]
    targets = {one.target: one.met for one in speed_verdicts(rows)}
    target = "AG and RS, return_A=True, torch's matmul: ours / matmul, worst at >= 512 rows"
    assert (target in targets) == judged
    assert targets.get(target, False) is False


def test_methods_that_could_not_run_are_not_judged() -> None:
    assert speed_verdicts([row("plain", 2.0), row("ours", None, reason="absent")]) == []


def test_memory_is_judged_where_it_grows_most_and_only_without_the_gathered_tensor() -> None:
    small = row("", None, return_A=False, gathered_bytes=100, growth_bytes=9)
    large = row("", None, m=4096, return_A=False, gathered_bytes=100, growth_bytes=11)
    kept = row("", None, return_A=True, gathered_bytes=100, growth_bytes=100)
    (found,) = memory_verdicts([small, large, kept])
    assert (found.figure, found.met) == (0.11, False)
    assert "M 4096" in found.where
