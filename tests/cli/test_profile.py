"""``symm-overlap profile`` prints where the time of a trace went, and reports other files in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from symm_overlap.cli.__main__ import main
from tests.profile.traces import nsight, program, write_chrome


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    write_chrome(path, *program())
    return path


def test_the_report_has_the_whole_trace_and_each_kind_of_call(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(trace)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{trace}: rank 2, NVIDIA H100 80GB HBM3"
    assert lines[1].endswith("% of it hidden")
    assert lines[2].startswith("  exposed communication ")
    assert lines[4] == "  all_gather_matmul((1024, 4096), gather_dim=0) of torch.bfloat16, 4 ranks, pipelined, 1 chunk"
    figures = dict(zip(lines[3].replace("= sums", "sums").split(), lines[5].split(), strict=True))
    assert figures["calls"] == "2"
    total, compute, exposed = (float(figures[name]) for name in ("total", "compute", "exposed"))
    assert total == pytest.approx(compute + exposed, abs=2e-3)
    parts = sum(float(figures[name]) for name in ("sums", "copies", "library", "waits", "other", "idle"))
    assert exposed == pytest.approx(parts, abs=5e-3)


def test_several_traces_of_both_profilers_are_read(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = tmp_path / "report.sqlite"
    nsight(database, *program())
    assert main(["profile", str(trace), str(database)]) == 0
    first, second = capsys.readouterr().out.split("\n\n")[:2]
    assert first.splitlines()[1:] == second.splitlines()[1:]
    assert second.splitlines()[0] == f"{database}: process 4711, NVIDIA H100 80GB HBM3"


def test_steps_are_compared_with_their_prediction(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(trace), "--steps"]) == 0
    shown = capsys.readouterr().out
    assert "predicted" in shown
    assert "on H100, measured" in shown
    row = next(line for line in shown.splitlines() if line.split()[:1] == ["pull"])
    assert row.count(" to ") == 2


def test_a_page_and_the_figures_are_written(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, figures = tmp_path / "page.html", tmp_path / "figures.json"
    assert main(["profile", str(trace), "--html", str(html), "--json", str(figures)]) == 0
    assert html.read_text().count("<svg ") == 2  # measured and predicted
    (found,) = json.loads(figures.read_text())
    assert (found["rank"], found["process"], found["calls"][0]["count"]) == (2, None, 2)
    assert found["all"]["total"] > found["calls"][0]["median_ms"]["total"] > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no trace", "neither JSON nor gzipped JSON"),
        ('{"traceEvents": []}', "neither an activity of a GPU nor a call of symm_overlap was recorded"),
    ],
)
def test_another_file_is_a_mistake_in_one_line(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    assert main(["profile", str(path)]) == 2
    shown = capsys.readouterr()
    assert (shown.out, len(shown.err.splitlines())) == ("", 1)
    assert message in shown.err


def test_a_missing_file_is_a_mistake_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["profile", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_a_trace_is_not_overwritten(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = trace.read_bytes()
    for option in ("--json", "--html"):
        assert main(["profile", str(trace), option, str(trace)]) == 2
        assert "trace and " + option[2:] + " are the same file" in capsys.readouterr().err
    assert trace.read_bytes() == before
