"""docs/pipeline.md shows what its program prints, and names every generator, kind of action and lowering pass."""

import contextlib
import io

from symm_overlap.pipeline import lowering
from symm_overlap.pipeline.action import KINDS
from symm_overlap.pipeline.generators import GENERATORS
from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs/pipeline.md"


def test_the_program_of_the_page_prints_what_the_page_shows():
    program, shown = list(blocks(PAGE))[:2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program.text, PAGE.name, "exec"), {})
    assert printed.getvalue().replace("\r\n", "\n") == shown.text


def test_the_page_names_everything():
    text = PAGE.read_text()
    assert [name for name in GENERATORS if f"| `{name}` |" not in text] == []
    assert [kind for kind in KINDS - set("FIWB") if kind not in text] == []
    assert [name for name in lowering.__all__ if f"`{name}`" not in text] == []
