"""The program in docs/nn.md runs on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.docs.two_ranks import printed_on_two_ranks


@pytest.mark.slow
def test_the_program_of_the_page(tmp_path: Path) -> None:
    (text,) = (block.text for block in blocks(ROOT / "docs/nn.md") if block.language == "python")
    for output in printed_on_two_ranks(text, tmp_path):
        assert output.splitlines()[-1:] == ["torch.Size([2, 64, 64]) torch.Size([256, 64])"], output
