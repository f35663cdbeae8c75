"""docs/pipeline.md shows what its simulator programs print, has simulated times in its table, and names transports."""

from __future__ import annotations

import contextlib
import io

import pytest

from symm_overlap.pipeline import PipelineCosts, simulate_cost
from symm_overlap.pipeline.generators import generate
from symm_overlap.pipeline.verify import TRANSPORTS
from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs/pipeline.md"


@pytest.mark.parametrize("first", [2, 4])
def test_the_programs_of_the_page_print_what_the_page_shows(first: int) -> None:
    program, shown = list(blocks(PAGE))[first : first + 2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program.text, PAGE.name, "exec"), {})
    assert printed.getvalue() == shown.text


@pytest.mark.parametrize(("words", "message"), [("nothing", 0.0), ("1/8", 0.125), ("1/4", 0.25)])
def test_the_table_of_the_page_is_what_the_simulator_finds(words: str, message: float) -> None:
    found = []
    for name, chunks in (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4)):
        part = 1 / chunks
        costs = PipelineCosts(forward=part, input_grad=part, weight_grad=part, message=message)
        found.append(simulate_cost(generate(name, 8, 16, chunks), costs).makespan)
    assert f"| {words} | " + " | ".join(f"{time:g}" for time in found) + " |" in PAGE.read_text()


def test_the_page_names_every_transport() -> None:
    text = PAGE.read_text()
    assert [transport for transport in TRANSPORTS if f'| `"{transport}"`' not in text] == []
