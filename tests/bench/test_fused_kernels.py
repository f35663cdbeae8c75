"""bench.fused_kernels: a run in the interpreter, what a GPU would try, and the verdicts, also of gpu_primitives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import fused_kernels, gpu_primitives
from bench.fused_kernels import OPS, variants, verdicts
from symm_overlap.kernels.configuration import RESERVED_SHARED_BYTES, SHARED_BYTES, configure
from symm_overlap.kernels.place import Machine

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_both_kernels_are_right_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "bench.fused_kernels", "--device", "cpu", "--shapes", "64,32,16", "--rounds", "1"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([*command, "--json", file], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [(row["op"], row["transposed"]) for row in found["rows"]] == [(op, t) for op in OPS for t in (False, True)]
    assert all(row["ok"] for row in found["rows"])
    assert len(found["targets"]) == 4


@pytest.mark.parametrize("n", [768, 3584])
def test_all_variants_fit_on_a_multiprocessor(n: int) -> None:
    chosen = configure(1024, n, 8192, torch.bfloat16, 90, all_rows=8192)
    found = variants(chosen, Machine(90, 132))
    assert (found[0].tiles, found[0].programs) == (chosen, 131)
    assert len({(variant.tiles, variant.programs) for variant in found}) == len(found) == 7
    for variant in found:
        each = -(-variant.programs // 132)
        assert each * variant.tiles.shared_bytes(2) <= SHARED_BYTES[90] - each * RESERVED_SHARED_BYTES


def test_the_chosen_tiles_are_judged() -> None:
    def row(n: int, variant: str, ratio: float) -> dict[str, object]:
        key = {"op": OPS[0], "m": 64, "n": n, "k": 16, "transposed": False}
        return {**key, "variant": variant, "over_library": ratio}

    mean, worst = verdicts([row(32, "chosen", 1.0), row(32, "a", 1.2), row(48, "chosen", 1.21), row(48, "a", 1.0)])
    assert (mean.figure, mean.met) == (pytest.approx(1.1), False)
    assert mean.where == "2 products; the best tiles: 1.000 (a, chosen)"
    assert (worst.figure, worst.where, worst.met) == (1.21, "64, 48, 16, W", False)


def test_what_was_measured_before_a_failure_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"op": OPS[0], "m": 64, "n": 32, "k": 16, "transposed": False, "variant": "chosen", "ok": True}
    row |= {"median_ms": 1.0, "tflops": 1.0, "over_library": 1.0}
    found = iter([[row]])  # the second product fails: no more rows
    monkeypatch.setattr(fused_kernels, "measure", lambda *_: next(found))
    assert fused_kernels.main(["--device", "cpu", "--shapes", "64,32,16", "--json", str(tmp_path / "rows")]) == 1
    written = json.loads((tmp_path / "rows").read_text())
    assert written["rows"] == [row]
    assert len(written["targets"]) == 2
    assert written["stopped"].startswith(f"{OPS[0]}, 64,32,16: StopIteration")


def test_the_reduce_is_judged_by_its_slowest_row() -> None:
    rows = [
        {"primitive": "reduce_partials", "dtype": "float32", "world": world, "of_copy": share}
        for world, share in ((2, 0.9), (8, 0.75))
    ]
    (found,) = gpu_primitives.verdicts([*rows, {"primitive": "stack and sum"}])
    assert (found.figure, found.where, found.met) == (pytest.approx(4 / 3), "float32, world 8", False)
    assert gpu_primitives.verdicts(rows[:1])[0].met
