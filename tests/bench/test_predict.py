"""What the model predicts, as the page shows it."""

from __future__ import annotations

import pytest

from bench import predict
from bench.harness.shapes import parse
from symm_overlap.runtime import TRAITS
from tests.docs.pages import ROOT, blocks


@pytest.mark.parametrize("arguments", [[], ["--published"]], ids=["table", "published"])
def test_the_page_shows_what_is_predicted_now(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = " ".join(["python -m bench.predict", *arguments])
    (shown,) = (block for block in blocks(ROOT / "docs/performance.md") if block.command == command)
    assert predict.main(arguments) == 0
    assert capsys.readouterr().out == shown.output, "python -m tests.docs.pages"


def test_all_sixteen_layers_have_a_row_whoever_wins() -> None:
    found = parse(["llama", "gpt3"], 8)
    header, *rows, mean = predict.table(TRAITS["cuda"].costs[0], 8, found)
    assert len(rows) == len(found) == 16
    assert header.split()[-4:] == ["x", "plain", "x", "torch"]
    assert [row[:23].strip() for row in rows] == [shape.label for shape in found]
    for row, shape in zip(rows, found, strict=True):
        plain, torchs, ours = predict.predictions(
            predict.OPS[shape.ops[0]], shape.m, shape.n, shape.k, TRAITS["cuda"].costs[0], 8
        )
        assert row.split()[-2:] == [f"{plain.total / ours.total:.2f}", f"{torchs.total / ours.total:.2f}"]
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
