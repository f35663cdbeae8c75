"""``symm-overlap plan`` prints, verifies, simulates and writes a plan, and reports a mistake in one line."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from symm_overlap.cli import plan as command
from symm_overlap.cli.__main__ import main
from symm_overlap.collective.planners import (
    ALL_GATHER_MATMUL_TOTAL,
    fused_all_gather_matmul,
    produce_reduce_scatter,
)
from symm_overlap.plan import Life, Region


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Set a terminal width at which no row is wrapped, because the tests read whole rows."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_the_plan_is_printed_as_a_picture_with_its_legend(op, capsys):
    assert main(["plan", op, "--world", "4", "--chunks", "2"]) == 0
    shown = capsys.readouterr().out
    for rank in range(4):
        for stream in ("compute0", "compute1", "copy"):
            assert f"rank {rank}  {stream}" in shown
    assert "?1 waits for a signal of rank 1" in shown


def test_options_choose_rank_and_streams(capsys):
    assert main(["plan", "all_gather_matmul", "--world", "3", "--rank", "1", "--one-thread", "--in-place"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rank")]
    assert rows == ["rank 1  compute0 | fork  publish 1 !0,2  consume 1  ?2 consume 2  ?0 consume 0  join"]
    assert main(["plan", "matmul_reduce_scatter", "--streams", "1", "--no-sleep"]) == 0
    shown = capsys.readouterr().out
    assert "compute1" not in shown
    assert main(["plan", "matmul_reduce_scatter", "--no-sleep"]) == 0
    assert "sleep" not in capsys.readouterr().out


def test_sequential_plans_have_one_part(capsys):
    assert main(["plan", "matmul_reduce_scatter", "--world", "3", "--rank", "0", "--sequential", "--in-place"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rank")]
    assert rows == ["rank 0  compute0 | fork  produce !1,2  ?2,1 reduce 0  join"]


def test_in_one_shot_ranks_meet_once(capsys):
    assert main(["plan", "matmul_all_reduce", "--world", "3", "--rank", "0", "--one-shot", "--verify"]) == 0
    shown = capsys.readouterr().out
    rows = [line for line in shown.splitlines() if line.startswith("rank")]
    assert rows == ["rank 0  compute0 | fork  produce !1,2  ?2 pull 2  ?1 pull 1  reduce  join"]
    assert "no deadlock, nor in any order of a CUDA graph, no race" in shown


@pytest.mark.parametrize("more", [[], ["--sequential"]], ids=["overlapped", "sequential"])
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_no_efficiency_is_made_up_where_matmuls_and_sums_use_peers_memory_in_place(op, more, capsys):
    assert main(["plan", op, "--one-thread", "--in-place", "--simulate", *more]) == 0
    shown = capsys.readouterr().out
    assert "no overlap efficiency: compute steps use peers' memory in place" in shown
    assert main(["plan", op, "--simulate", *more]) == 0
    assert "no overlap efficiency" not in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--fused"]])
@pytest.mark.parametrize("op", command.PLANNERS)
def test_two_copy_streams_are_proven_and_shown(op, more, capsys):
    assert main(["plan", op, "--copies", "2", "--world", "3", "--verify", *more]) == 0
    assert "\nrank 0  copy1 " in (shown := "\n" + capsys.readouterr().out)
    assert "no race" in shown


@pytest.mark.parametrize("op", command.PLANNERS)
def test_matmuls_of_several_parts_are_proven_shown_and_take_longer(op, capsys):
    assert main(["plan", op, "--world", "5", "--span", "2", "--verify", "--simulate", "--rank", "0"]) == 0
    shown = capsys.readouterr().out
    assert "no race" in shown
    assert "1-3 are the parts of ranks 1 to 3" in shown
    assert re.search(r"(consume|produce) 1-2\b", shown)
    assert "compute alone 5.100" in shown, "five parts and a tail"


def test_verify_says_what_was_proven(capsys):
    assert main(["plan", "matmul_all_reduce", "--verify"]) == 0
    assert "three calls back to back, " in (shown := capsys.readouterr().out)
    assert "no deadlock, nor in any order of a CUDA graph, no race" in shown


def test_the_plan_of_a_kernel_is_proven_for_any_order_of_its_tiles(capsys, monkeypatch):
    assert main(["plan", "all_gather_matmul", "--fused", "--verify"]) == 0
    assert "three calls back to back, with tiles in any order, " in capsys.readouterr().out

    def one_output(rank, world, **arguments):
        """All tiles add to one unit of the output, which is right only if they run in order."""
        plan = fused_all_gather_matmul(rank, world, **arguments)
        steps = list(plan.steps)
        one = Region("output", rank, 0, 1)
        tiles = [step for step in steps if step.kind == "tiles"]
        for index, step in enumerate(steps):
            if step.kind == "tiles":
                before = (one,) * (step is not tiles[0])
                steps[index] = replace(step, reads=(*step.reads, *before), writes=(one,))
        steps[-1] = replace(steps[-1], reads=(one,))
        return replace(plan, steps=tuple(steps))

    monkeypatch.setitem(command.FUSED, "all_gather_matmul", one_output)
    monkeypatch.setitem(command.CONTRACTS, "all_gather_matmul", ALL_GATHER_MATMUL_TOTAL)
    assert main(["plan", "all_gather_matmul", "--fused", "--verify"]) == 1
    in_order, in_any_order = capsys.readouterr().out.split("three calls back to back, ")[1:]
    assert "no race, every output written once with the right values" in in_order
    assert "data race" in in_any_order


def test_a_plan_that_does_not_hold_is_an_error_with_the_race(capsys, monkeypatch):
    def one_workspace(rank, world, **arguments):
        plan = produce_reduce_scatter(rank, world, **arguments)
        return replace(plan, buffers={**plan.buffers, "workspace": Life.PERSISTENT})

    monkeypatch.setitem(command.PLANNERS, "matmul_reduce_scatter", one_workspace)
    assert main(["plan", "matmul_reduce_scatter", "--verify"]) == 1
    assert "data race" in capsys.readouterr().out


def test_simulate_reports_figures_for_the_costs_given(capsys):
    assert main(["plan", "all_gather_matmul", "--simulate", "--matmul-ms", "2", "--copy-ms", "0.25"]) == 0
    shown = capsys.readouterr().out
    assert "a matmul of 2.0 ms and a copy of 0.25 ms a chunk" in shown
    assert "compute alone 8.200, copies alone 1.000" in shown, (
        "compute is four matmuls and a tail, copies are one publish and three pulls"
    )
    assert "overlap efficiency" in shown


def test_image_and_trace_are_written(tmp_path):
    image, trace = tmp_path / "plan.svg", tmp_path / "plan.json"
    assert main(["plan", "matmul_reduce_scatter", "--svg", str(image), "--trace", str(trace)]) == 0
    assert ElementTree.parse(image).getroot().tag.endswith("svg")
    assert json.loads(trace.read_text())["traceEvents"]


DURATIONS = ["--matmul-ms", "--copy-ms"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--world", "0"], "--world is 0"),
        (["--chunks", "0"], "chunks is 0"),
        (["--rank", "4"], "no rank 4 in a plan for ranks 0 to 3"),
        (["--one-thread", "--streams", "2"], "leave out --streams 2"),
        (["--one-thread", "--copies", "2"], "leave out --copies 2"),
        (["--sequential", "--copies", "2"], "leave out --copies 2"),
        (["--sequential", "--span", "3"], "leave out --span 3"),
        (["--fused", "--span", "2"], "leave out --span"),
        (["--span", "0"], "span is 0"),
        (["--span", "2", "--chunks", "2"], "span is 2"),
        *(([option, value], f"{option} is {value}") for option in DURATIONS for value in ("-1.0", "nan", "inf")),
        (["--sequential", "--chunks", "2"], "leave out --chunks 2"),
        (["--sequential", "--streams", "2"], "leave out --streams 2"),
        (["--one-shot"], "--one-shot is for matmul_all_reduce, not for all_gather_matmul"),
        (["--fused", "--in-place", "--streams", "2"], "leave out --streams, --in-place"),
        (["--fused", "--one-shot", "--no-sleep"], "leave out --one-shot, --no-sleep"),
        (["--svg", "x", "--trace", "./x"], "svg and trace are the same file, x: one would overwrite the other"),
        (["--world", "1000000"], "ranks * ranks * chunks is 1e+12: this command works up to 65536"),
        (["--chunks", "99999999999999999999"], "ranks * ranks * chunks is"),
        (["--matmul-ms", "1e308", "--simulate"], "the durations add up to more than a float can hold"),
        (["--svg", "/nonexistent/plan.svg"], "/nonexistent/plan.svg: No such file"),
        (["--svg", "/dev/full"], "/dev/full: No space left"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, said, capsys):
    assert main(["plan", "matmul_all_reduce" if "--fused" in arguments else "all_gather_matmul", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
