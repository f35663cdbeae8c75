"""Benchmarks record what is exposed: with torch's profiler, or in NVTX ranges for Nsight Systems."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import collective_matmul, results
from bench.harness import exposed
from bench.harness.launch import Rank
from bench.harness.timing import Timed
from symm_overlap.profile import read


def test_what_is_exposed_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, traces = tmp_path / "result.json", tmp_path / "new" / "traces"
    arguments = ["--emulate", "3", "--link", "device", "--shapes", "24,16,32", "--ops", "ag,rs", "--rounds", "1"]
    methods = "matmul", "sequential", "published", "ours_kernel_waits"
    assert collective_matmul.main([*arguments, "--methods", *methods, "--exposed", "--traces", str(traces)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("exposed, ms, while a profiler records") == 2
    assert "when arithmetic of the model ran" in printed
    assert collective_matmul.main([*arguments, "--methods", *methods, "--exposed", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    shown = {(row["op"], row["method"]): row["exposure_ms"] for row in rows if "exposure_ms" in row}
    assert {method for _, method in shown} == set(methods) - {"matmul"}, "a matmul is no call of ours"
    for spent in shown.values():
        assert 0 < spent["compute"] < spent["total"]
    assert shown["matmul_reduce_scatter", "ours_kernel_waits"]["sums"] > 0
    capsys.readouterr()
    assert results.main([str(file)]) == 0
    assert capsys.readouterr().out.count("| published |") == 2
    for trace in traces.iterdir():
        recordings = read(trace)
        assert [len(recording.calls) for recording in recordings] == ([] if "_matmul_rank" in trace.name else [5])
    assert len(list(traces.iterdir())) == 2 * len(methods)


def test_calls_for_nsight_systems_run_in_nvtx_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in takes the place of ``emit_nvtx``, which needs a GPU. It is told which calls are inside."""
    inside: list[bool] = []

    class Emitting:
        active = False

        def __enter__(self) -> None:
            Emitting.active = True

        def __exit__(self, *error: object) -> None:
            Emitting.active = False

    monkeypatch.setattr(exposed, "emit_nvtx", Emitting)
    rank = Rank(0, 1, torch.device("cpu"), "fake", SimpleNamespace(wait=lambda: None))  # type: ignore[arg-type]
    method = Timed(lambda: inside.append(Emitting.active))
    assert exposed.exposures(rank, {"ours": method}, exposed.Profiling(nvtx=True), "") == {}
    assert inside == [False] + [True] * 5
