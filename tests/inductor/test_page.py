"""A test of the program in docs/compile.md."""

from __future__ import annotations

from tests.docs.pages import ROOT
from tests.docs.two_ranks import printed_on_two_ranks


def test_the_program_of_the_page_fuses_every_collective_beside_a_matmul(tmp_path):
    first, second = printed_on_two_ranks((ROOT / "tests/docs/examples/compiled_model.py").read_text(), tmp_path)
    assert [line for line in first.splitlines() if line.endswith("collectives beside a matmul fused")] == [
        "2 of 2 collectives beside a matmul fused",
        "1 of 1 collectives beside a matmul fused",
    ]
    told = "Guards may run slower on Python 3.13.0"  # torch's warning of two lines, there alone
    assert not second or (told in second and len(second.splitlines()) == 2)
