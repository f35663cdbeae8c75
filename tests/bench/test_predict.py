"""The predictions of the cost model match those on the documentation page."""

from __future__ import annotations

import pytest

from bench import predict
from bench.harness.shapes import parse
from symm_overlap.runtime import Device
from tests.docs.pages import ROOT, blocks

# The row that loses to torch's plan, and the next one.
KERNELS = ["--waits", "kernels", "--shapes", "8192,768,4096", "8192,4096,512"]


@pytest.mark.parametrize("arguments", [[], KERNELS], ids=["table", "kernels"])
def test_the_page_shows_what_is_predicted_now(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = " ".join(["python -m bench.predict", *arguments])
    (shown,) = (block for block in blocks(ROOT / "docs/performance.md") if block.command == command)
    assert predict.main(arguments) == 0
    assert capsys.readouterr().out == shown.output, "python -m tests.docs.pages"


def test_all_sixteen_layers_have_a_row_whoever_wins() -> None:
    found = parse(["llama", "gpt3"], 8)
    header, *rows, mean = predict.table(Device("H100"), 8, found)
    assert len(rows) == len(found) == 16
    assert header.split()[-8:] == ["ours", "x", "plain", "x", "torch", "fused", "x", "plain"]
    assert [row[:23].strip() for row in rows] == [shape.label for shape in found]
    for row, shape in zip(rows, found, strict=True):
        op, size = predict.OPS[shape.ops[0]], (shape.m, shape.n, shape.k)
        plain, torchs, ours, fused = predict.predictions(op, *size, Device("H100"), 8)
        assert (plain.path, torchs.path, fused.path) == ("sequential", "torch", "fused")
        assert ours.path in ("sequential", "pipelined"), "the fused kernel was not measured on an H100"
        times = [f"{each.total:.3f}" for each in (plain, torchs, ours, fused)]
        gains = plain.total / ours.total, torchs.total / ours.total, plain.total / fused.total
        numbers = [word for word in row[47:].split() if "." in word]
        assert numbers == [*times[:3], *(f"{gain:.2f}" for gain in gains[:2]), times[3], f"{gains[2]:.2f}"]
    assert mean.startswith("geometric mean")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--world", "1"], "at least 2 ranks"), (["--shapes", "x"], "shape set is 'x'"), (["--device", "T4"], "T4")],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        predict.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
