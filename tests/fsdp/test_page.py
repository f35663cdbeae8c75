"""A test of the program in docs/fsdp_prefetch.md."""

from __future__ import annotations

from tests.docs.pages import ROOT
from tests.docs.two_ranks import printed_on_two_ranks


def test_the_program_of_the_page_plans_what_each_layer_gathers_ahead(tmp_path):
    first, second = printed_on_two_ranks((ROOT / "tests/docs/examples/fsdp_model.py").read_text(), tmp_path)
    lines = first.splitlines()
    assert lines[0] == "prefetch auto: planned"
    assert [line.split(":")[0] for line in lines if ": forward " in line] == ["the model", "0", "1", "2", "3"]
    assert not second
