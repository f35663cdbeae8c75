"""The pages of this repository, and the blocks in them that a command makes or a test runs.

    python -m tests.docs.pages          # write what the commands print, and what the files hold, into the pages

In a page

- a ``console`` block that begins with ``$ symm-overlap plan`` shows that command and what it prints; with
  ``--svg FILE`` the command also makes the picture beside it;
- a ``console`` block that begins with one of `PROGRAMS` shows what that prints;
- a ``python`` block right after ``<!-- FILE -->`` is that file.
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

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench/RESULTS.md", *(ROOT / "docs").glob("*.md")])
PROGRAMS = (
    "python -m tests.docs.call_path",
    "python -m bench.compile_sites",
    "python -m bench.predict",
    "python -m bench.predict --published",
    "python -m bench.predict --waits kernels --shapes 8192,768,4096 8192,4096,512",
)
COLUMNS = "110"  # how wide the terminal is that the pages show

_BLOCK = re.compile(r"(?:<!-- (?P<file>\S+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)

_PRINTS_THE_SAME = ("symm-overlap plan ", "symm-overlap schedule ", "symm-overlap fsdp ")
"""How the commands begin that print the same every time."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: where it stands.
        language: what follows the fence.
        text: what stands between the fences.
        file: the file that it shows, if the line ahead of it names one.
        start: where its text begins in the page.
    """

    page: Path
    language: str
    text: str
    file: str | None
    start: int

    @property
    def command(self) -> str:
        """The command that a console block shows, without the prompt; empty if it shows none."""
        first = self.text.partition("\n")[0]
        return first.removeprefix("$ ") if self.language == "console" and first.startswith("$ ") else ""

    @property
    def output(self) -> str:
        """What a console block shows as printed."""
        return self.text.partition("\n")[2]

    def __str__(self) -> str:
        return f"{self.page.name}: {self.file or self.command or self.text[:40]}"


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    for match in _BLOCK.finditer(page.read_text()):
        yield Block(page, match["language"], match["text"], match["file"], match.start("text"))


def plan_commands() -> list[Block]:
    """The blocks of all pages that show a command that prints the same every time."""
    return [block for page in PAGES for block in blocks(page) if block.command.startswith(_PRINTS_THE_SAME)]


def shown_files() -> list[Block]:
    """The blocks of all pages that show a file."""
    return [block for page in PAGES for block in blocks(page) if block.file is not None]


def printed_by(block: Block, folder: Path) -> str:
    """Run the ``symm-overlap`` command of a block in ``folder``; return what it prints."""
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


def _renewed(block: Block) -> str:
    """The text that a block should have."""
    if block.file is not None:
        return (ROOT / block.file).read_text()
    if block.command.startswith(_PRINTS_THE_SAME):
        return f"$ {block.command}\n{printed_by(block, ROOT)}"
    if block.command in PROGRAMS:
        run = [sys.executable, *block.command.split()[1:]]
        return f"$ {block.command}\n{subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True).stdout}"
    return block.text


def _with_counts(text: str) -> str:
    """A page with its table of counts, whose last column says again what the block of `tests.docs.call_path` says."""
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
    for page in PAGES:
        text, found = page.read_text(), list(blocks(page))
        for block in reversed(found):  # from the end, so that the places of earlier blocks stay right
            text = text[: block.start] + _renewed(block) + text[block.start + len(block.text) :]
        text = _with_counts(text)
        if text != page.read_text():
            page.write_text(text)
            print(f"renewed {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
