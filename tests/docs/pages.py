"""The pages of this repository, and the blocks in them that a command generates or a test runs.

    python -m tests.docs.pages          # write the output of the commands and the contents of the files into the pages

In a page

- a ``console`` block that begins with ``$ symm-overlap plan`` shows that command and its output; with ``--svg FILE``
  the command also draws the picture beside it;
- a ``console`` block that begins with one of `PROGRAMS` shows the output of that program;
- a ``python`` block right after ``<!-- FILE -->`` shows that file.

The page docs/reference.md comes from `tests.docs.reference`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from symm_overlap.cli.__main__ import main as symm_overlap_command
from tests.docs import reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench/RESULTS.md", *(ROOT / "docs").glob("*.md")])
PROGRAMS = (
    "python -m tests.docs.call_path",
    "python -m bench.compile_sites",
    "python -m bench.model_error",
    "python -m bench.model_error bench/measured/h200_llama.json",
    "python -m bench.predict",
    "python -m bench.predict --waits kernels --shapes 8192,768,4096 8192,4096,512",
)
COLUMNS = "110"  # width of the terminal that the pages show

_BLOCK = re.compile(r"(?:<!-- (?P<file>\S+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)

_PRINTS_THE_SAME = ("symm-overlap plan ", "symm-overlap schedule ", "symm-overlap fsdp ", "python -c ")
"""Prefixes of the commands that print the same output every time."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: the page that contains the block.
        language: the word after the opening fence.
        text: the text between the fences.
        file: the file that the block shows, if the line before it names one.
        start: the offset of the text in the page.
    """

    page: Path
    language: str
    text: str
    file: str | None
    start: int

    @property
    def command(self) -> str:
        """The command that a console block shows, without the prompt. Empty if it shows none."""
        first = self.text.partition("\n")[0]
        return first.removeprefix("$ ") if self.language == "console" and first.startswith("$ ") else ""

    @property
    def output(self) -> str:
        """The output that a console block shows."""
        return self.text.partition("\n")[2]

    def __str__(self) -> str:
        return f"{self.page.name}: {self.file or self.command or self.text[:40]}"


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, in order."""
    for match in _BLOCK.finditer(page.read_text()):
        yield Block(page, match["language"], match["text"], match["file"], match.start("text"))


def plan_commands() -> list[Block]:
    """Return the blocks of all pages that show a command with the same output every time."""
    return [block for page in PAGES for block in blocks(page) if block.command.startswith(_PRINTS_THE_SAME)]


def shown_files() -> list[Block]:
    """Return the blocks of all pages that show a file."""
    return [block for page in PAGES for block in blocks(page) if block.file is not None]


def printed_by(block: Block, folder: Path) -> str:
    """Run the command of a block in ``folder``. Return its output."""
    if block.command.startswith("python "):
        return _by_python(shlex.split(block.command)[1:])
    before, columns = Path.cwd(), os.environ.get("COLUMNS")
    printed = io.StringIO()
    os.chdir(folder)
    os.environ["COLUMNS"] = COLUMNS
    try:
        with contextlib.redirect_stdout(printed):
            code = symm_overlap_command(shlex.split(block.command)[1:])
    finally:
        os.chdir(before)
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    if code != 0:
        raise ValueError(f"{block}: the command ended with {code}")
    return printed.getvalue()


def _by_python(arguments: list[str]) -> str:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _renewed(block: Block) -> str:
    """Return the text that a block should have."""
    if block.file is not None:
        return (ROOT / block.file).read_text()
    if block.command.startswith(_PRINTS_THE_SAME):
        return f"$ {block.command}\n{printed_by(block, ROOT)}"
    if block.command in PROGRAMS:
        return f"$ {block.command}\n{_by_python(block.command.split()[1:])}"
    return block.text


def _with_counts(text: str) -> str:
    """Update the table of counts in a page. Its last column repeats the counts of `tests.docs.call_path`."""
    counts = dict(re.findall(r"^((?:all|tensor), .+): (\d+ files, \d+ returns)$", text, re.MULTILINE))
    return re.sub(
        r"^(\| ((?:all|tensor), [^|]+) \|[^|]+\|) ([^|]+) \|$",
        lambda row: f"{row[1]} {counts.get(row[2], row[3])} |",
        text,
        flags=re.M,
    )


def main() -> int:
    """Renew every page."""
    (ROOT / "docs/pictures").mkdir(exist_ok=True)
    reference.PAGE.write_text(reference.text())
    for page in PAGES:
        text, found = page.read_text(), list(blocks(page))
        for block in reversed(found):  # from the end, so that the offsets of earlier blocks stay valid
            text = text[: block.start] + _renewed(block) + text[block.start + len(block.text) :]
        text = _with_counts(text)
        if text != page.read_text():
            page.write_text(text)
            print(f"renewed {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
