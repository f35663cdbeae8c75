"""``symm-overlap fsdp plan`` prints, proves, times and writes a plan, and reports a mistake in one line."""

import json
from xml.etree import ElementTree

import pytest

from symm_overlap.cli import fsdp as command
from symm_overlap.cli.__main__ import main


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Set a terminal width at which no row is wrapped, because the tests read whole rows."""
    monkeypatch.setenv("COLUMNS", "400")


def rows(capsys):
    shown = capsys.readouterr().out
    return shown, {
        line.split()[2]: line.partition("|")[2].split("  ") for line in shown.splitlines() if "rank 0" in line
    }


def test_the_plan_is_printed_with_a_row_for_each_stream(capsys):
    assert main(["fsdp", "plan", "--prefetch", "depth=2", "--forward-only"]) == 0
    shown, streams = rows(capsys)
    assert set(streams) == {"compute", "gather"}
    assert [cell.strip() for cell in streams["gather"] if cell.strip()] == [f"gather {layer}" for layer in range(4)]
    assert "layer 0 gathers ahead: forward 1, 2; backward torch's default" in shown


def test_a_whole_step_is_proven_and_timed(capsys):
    arguments = ["--compute", "2,2,8,2", "--gather", "1", "--optimizer", "1", "--steps", "2", "--event", "--other", "3"]
    assert main(["fsdp", "plan", *arguments, "--verify", "--simulate", "--world", "3"]) == 0
    shown, streams = rows(capsys)
    assert set(streams) == {"compute", "gather", "reduce"}
    assert "three calls back to back on 3 ranks, " in shown
    assert "no deadlock, no race" in shown
    assert "compute alone 89.000, copies alone 24.000" in shown, (
        "compute is 2 x (14 + 28 + 1) + 3, copies are 2 x (8 gathers + 4 reductions)"
    )
    assert "gathered and unsharded parameters: at most 2 MiB" in shown


def test_large_layers_hide_gathers_of_small_ones_only_if_they_are_told(capsys):
    arguments = ["--compute", "8,1,1,1,1", "--gather", "1,2,2,2,2", "--mib", "1,4,4,4,4", "--forward-only"]
    assert main(["fsdp", "plan", *arguments, "--compare"]) == 0
    table = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.count(".") == 2}
    assert table["default"] == ["14.000", "2.000", "8"]
    assert table["depth=4"][:2] == ["13.000", "1.000"]
    assert table["auto"][:2] == ["13.000", "1.000"]
    assert float(table["auto"][2]) < float(table["depth=4"][2]), "auto must need less memory than depth=4"
    assert main(["fsdp", "plan", *arguments, "--prefetch", "auto=8MiB", "--simulate"]) == 0
    assert "exposed communication 2.000 ms" in capsys.readouterr().out


def test_layers_are_skipped_run_twice_and_kept(capsys):
    assert main(["fsdp", "plan", "--order", "0,2,0", "--keep", "2", "--prefetch", "depth=0", "--verify"]) == 0
    _, streams = rows(capsys)
    gathers = [cell.strip() for cell in streams["gather"] if cell.strip()]
    assert gathers == [f"gather {each}" for each in ("0.0", "2.0", "0.1", "0.2", "0.3")]


def test_a_plan_that_does_not_hold_is_an_error_with_the_race(capsys, monkeypatch):
    monkeypatch.setattr(command, "step_plan", lambda *arguments: without_waits(command_step_plan(*arguments)))
    assert main(["fsdp", "plan", "--verify"]) == 1
    assert "data race" in capsys.readouterr().out


command_step_plan = command.step_plan


def without_waits(made):
    """Return a copy of the plan in which no gather waits for the copy-outs that read the memory it reuses."""
    from symm_overlap.fsdp.prefetch.issue_order import RELEASE
    from symm_overlap.fsdp.prefetch.step_plan import StepPlan

    class Careless(StepPlan):
        def for_rank(self, rank, world):
            plan = made.for_rank(rank, world)
            steps = [step if step.kind != "gather" else changed(step) for step in plan.steps]
            return type(plan)(plan.op, rank, world, tuple(steps), plan.buffers)

    def changed(step):
        return type(step)(**{**{name: getattr(step, name) for name in step.__slots__}, "after": ()})

    assert any(issue.what == RELEASE for issue in made.issued)
    careless = Careless.__new__(Careless)
    careless.__dict__.update(made.__dict__)
    return careless


def test_image_and_trace_are_written(tmp_path):
    image, trace = tmp_path / "plan.svg", tmp_path / "plan.json"
    assert main(["fsdp", "plan", "--svg", str(image), "--trace", str(trace)]) == 0
    assert ElementTree.parse(image).getroot().tag.endswith("svg")
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layers", "0"], "--layers is 0: there must be at least 1"),
        (["--compute", "1,2", "--gather", "1,2,3"], "lists of 2, 3"),
        (["--layers", "3", "--compute", "1,2"], "3 layers with lists of 2"),
        (["--compute", "x"], "--compute is x"),
        (["--gather", "1,-1"], "--gather is 1,-1"),
        (["--mib", "nan"], "--mib is nan"),
        (["--compute="], "--compute is : give numbers"),
        (["--reduce="], "--reduce is : give numbers"),
        (["--copy-out="], "--copy-out is : give numbers"),
        (["--order", "0,4"], "--order is 0,4: name layers 0 to 3"),
        (["--keep", "a"], "--keep is a"),
        (["--steps", "0"], "--steps is 0"),
        (["--world", "0"], "--world is 0"),
        (["--optimizer", "inf"], "--optimizer is inf"),
        (["--optimizer", "-1", "--forward-only"], "--optimizer is -1"),
        (["--other", "-1"], "--other is -1"),
        (["--layers", "501", "--steps", "2", "--prefetch", "auto"], "layers * steps is 1002: this command works up to"),
        (["--prefetch", "depth"], "prefetch policy 'depth'"),
        (["--layers", "99999999999999"], "layers * steps is 1e+14: this command works up to 50000"),
        (["--svg", "x", "--trace", "x"], "svg and trace are the same file"),
        (["--steps", "1000000"], "layers * steps is 4e+06"),
        (["--world", "1000000", "--verify"], "layers * steps * 3 calls * ranks is 1.2e+07"),
        (["--mib", "1e308"], "a number is too large"),
        (["--svg", "/nonexistent/plan.svg"], "/nonexistent/plan.svg: No such file"),
        (["--trace", "/dev/full"], "/dev/full: No space left"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, said, capsys):
    assert main(["fsdp", "plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
