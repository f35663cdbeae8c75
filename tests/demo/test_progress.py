"""A run shows a table, a bar and a summary, and two loss curves agree within a relative difference."""

from __future__ import annotations

import io
import math

import pytest

from symm_overlap.demo.progress import Curve, Report, agreement


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(steps: int, bar: io.StringIO, curves: int = 1) -> str:
    out = io.StringIO()
    found = [Curve(name, [], []) for name in ("ours", "other")[:curves]]
    report = Report(found, steps, 1000, out, bar)
    report.header()
    for step in range(1, steps + 1):
        for curve in found:
            curve.losses.append(1 / step)
            curve.seconds.append(0.5)
        report.step(step)
    report.summary()
    return out.getvalue()


def test_table_has_the_first_and_last_step_and_about_ten_rows() -> None:
    rows = [line.split() for line in shown(234, io.StringIO()).splitlines() if line.split()[0].isdigit()]
    assert rows[0] == ["1", "1.00000", "500.0", "2000"]
    assert rows[-1] == ["234", "0.00427", "500.0", "2000"]
    assert 10 <= len(rows) <= 13


def test_two_curves_stand_side_by_side() -> None:
    lines = shown(1, io.StringIO(), curves=2).splitlines()
    assert lines[0].split("  ")[-1] == "tokens/s"
    assert lines[1].split() == ["1", "1.00000", "1.00000", "500.0", "500.0", "2000"]
    assert "ours takes 1.00 x that of other" in lines[-1]


def test_bar_is_for_terminals_and_leaves_nothing_behind() -> None:
    terminal, file = Terminal(), io.StringIO()
    shown(4, terminal)
    shown(4, file)
    assert file.getvalue() == ""
    assert "[######..................] 1/4  loss 1.000  2000 tokens/s" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_a_loss_of_zero_agrees_with_zero_alone() -> None:
    assert agreement([1.0, 0.0], [1.0, 0.0], 1e-4).ok
    assert agreement([0.0, 1e-9], [0.0, 0.0], 1e-4).first_bad_step == 2
    assert agreement([math.nan], [0.0], 1e-4).first_bad_step == 1


def test_losses_agree_within_the_allowed_relative_difference() -> None:
    found = agreement([2.0, 4.0002], [2.0, 4.0], 1e-4)
    assert found.ok
    assert found.largest == pytest.approx(5e-5)
    assert found.largest_step == 2
    assert "agree" in str(found)


def test_the_first_step_that_disagrees_is_named() -> None:
    found = agreement([1.0, 2.1, 3.0, 5.0], [1.0, 2.0, 3.0, 4.0], 1e-4)
    assert not found.ok
    assert found.first_bad_step == 2
    assert found.largest_step == 4
    assert "DISAGREE from step 2 on" in str(found)


@pytest.mark.parametrize("losses", [([math.nan], [math.nan]), ([1.0], [math.nan]), ([math.inf], [math.inf])])
def test_a_loss_that_is_no_number_never_agrees(losses: tuple[list[float], list[float]]) -> None:
    assert agreement(*losses, 1e-4).first_bad_step == 1


def test_summary_gives_the_mean_loss_of_the_last_tenth_of_the_steps() -> None:
    last = shown(30, io.StringIO()).splitlines()[-1]
    mean = (1 / 28 + 1 / 29 + 1 / 30) / 3
    assert (
        last
        == f"ours: loss 1.000 -> {mean:.3f} nats a byte (mean of the last 3 steps), median step 500.0 ms, 2000 tokens/s"
    )
    assert "loss 1.000 -> 0.500 nats a byte, median" in shown(2, io.StringIO()).splitlines()[-1]


def test_median_time_leaves_out_the_first_step() -> None:
    assert Curve("x", [], [9.0, 1.0, 3.0]).median_seconds() == 2.0
    assert Curve("x", [], [9.0]).median_seconds() == 9.0
