"""Tests that the pages show the commands' current output, existing files, and figures that were recorded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import call_path, pages, reference
from tests.docs.pages import PAGES, ROOT
from tests.docs.two_ranks import printed_on_two_ranks

README = ROOT / "README.md"
RENEW = "run `python -m tests.docs.pages` and check its changes"


def text_of(block):
    return str(block)


@pytest.mark.parametrize("block", pages.plan_commands(), ids=text_of)
def test_a_plan_in_a_page_is_what_its_command_prints_and_draws(block, tmp_path):
    (tmp_path / "docs/pictures").mkdir(parents=True)
    assert pages.printed_by(block, tmp_path) == block.output, RENEW
    for picture in (tmp_path / "docs/pictures").iterdir():
        assert picture.read_text() == (ROOT / "docs/pictures" / picture.name).read_text(), RENEW


@pytest.mark.parametrize("picture", sorted((ROOT / "docs/pictures").iterdir()), ids=lambda path: path.name)
def test_the_command_of_every_picture_stands_in_a_page(picture):
    assert any(f"--svg docs/pictures/{picture.name}" in block.command for block in pages.plan_commands())


@pytest.mark.parametrize("block", pages.shown_files(), ids=text_of)
def test_a_page_shows_a_file_as_it_is(block):
    assert block.text == (ROOT / block.file).read_text(), RENEW


def test_the_reference_shows_every_public_name_as_it_is():
    assert reference.PAGE.read_text() == reference.text(), RENEW


def test_the_blocks_that_these_tests_need_are_found():
    assert len(pages.plan_commands()) >= 5
    assert len(pages.shown_files()) == 12
    assert [block.command for block in pages.blocks(ROOT / "docs/architecture.md")][
        -1
    ] == "python -m tests.docs.call_path"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_names_of_files_lead_somewhere(page):
    text = page.read_text()
    links = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    missing = [target for target in links if not (page.parent / target).exists()]
    names = set(re.findall(r"`((?:symm_overlap|tests|bench|docs|csrc)/[\w./]+\w)`", text))
    missing += [name for name in names if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_no_page_leads_out_of_the_repository(page):
    """A reader who clones the repository has only its files."""
    inside = [(page.parent / target).resolve() for target in re.findall(r"\]\(([^):]+)\)", page.read_text())]
    assert all(target.is_relative_to(ROOT) for target in inside)


def test_the_readme_has_less_than_900_words():
    assert len(README.read_text().split()) < 900


def python_blocks(page):
    return [block.text for block in pages.blocks(page) if block.language == "python" and block.file is None]


CHECK = """
def everyone(tensor, reduce=False):
    if reduce:
        dist.all_reduce(tensor)
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)

whole = everyone(x.detach()).requires_grad_()
plain = (whole @ up) * torch.sigmoid(whole @ gate) @ down
total = everyone(plain.detach().clone(), reduce=True).chunk(world)[dist.get_rank()]
# The terms of these sums are large: their rounding counts, not that of an element that is nearly zero.
torch.testing.assert_close(y.detach(), total, rtol=1e-4, atol=1e-3 * total.std().item())
plain.sum().backward()
gradient = everyone(whole.grad, reduce=True).chunk(world)[dist.get_rank()]
torch.testing.assert_close(x.grad, gradient, rtol=1e-4, atol=1e-3 * gradient.std().item())
dist.barrier()
dist.destroy_process_group()
print("equal")
"""


def test_the_example_of_the_readme_equals_plain_pytorch_on_two_ranks(tmp_path):
    for output in printed_on_two_ranks("\n".join([*python_blocks(README), CHECK]), tmp_path):
        assert output.splitlines()[-1:] == ["equal"], output
        assert output.startswith("pipelined ("), "the output of `explain` must come first"


PROGRAMS = [ROOT / "docs/plans.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda path: path.name)
def test_the_programs_of_the_pages_run(page, capsys):
    (program,) = python_blocks(page)
    exec(compile(program, page.name, "exec"), {})
    assert capsys.readouterr().out


def rows(page: Path, columns: int) -> list[list[str]]:
    """Return the rows of a page's tables that have so many columns and begin with an op and sizes."""
    cells = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in page.read_text().splitlines()]
    return [row for row in cells if len(row) == columns and re.fullmatch(r"\d+, \d+, \d+", row[1])]


# The rows of the first table in that file: op; M, N, K; and twelve figures. Rows of a later table are for transposed
# weights.
RECORDED = {(row[0], row[1]): row[2:] for row in reversed(rows(ROOT / "bench/RESULTS.md", 14))}


def check_ratios(shown: list[str], ours: str, plain_of_ours: str, recorded: str) -> None:
    """Check ours / plain as recorded, and ours / plain with the same matmul, within the rounding of the two times."""
    assert shown[0] == recorded
    assert abs(float(shown[1]) - float(ours) / float(plain_of_ours)) < 0.011


@pytest.mark.parametrize("row", rows(README, 6), ids=lambda row: f"{row[0]} {row[1]}")
def test_results_in_the_readme_are_recorded(row):
    _, _, _, plain, plain_of_ours, _, ours, *_, recorded, _ = RECORDED[row[0], row[1]]
    assert row[2:4] == [plain, ours]
    check_ratios(row[4:], ours, plain_of_ours, recorded)


@pytest.mark.parametrize("row", rows(ROOT / "docs/performance.md", 9), ids=lambda row: f"{row[0]} {row[1]}")
def test_results_in_the_page_on_performance_are_recorded(row):
    matmul, matmul_of_ours, _, plain, plain_of_ours, _, ours, no_gathered, *_, recorded, _ = RECORDED[row[0], row[1]]
    assert row[2:7] == [f"{matmul}, {matmul_of_ours}", plain, plain_of_ours, ours, no_gathered]
    check_ratios(row[7:], ours, plain_of_ours, recorded)


def test_every_recorded_row_stands_in_the_page_on_performance():
    shown = {(row[0], row[1]) for row in rows(ROOT / "docs/performance.md", 9)}
    assert shown == set(RECORDED)
    assert len(rows(README, 6)) == 3


def watch(me):
    return call_path.watch_call(me.rank, me.group)


def test_the_page_on_the_architecture_lists_the_files_that_a_call_passes(fresh_ranks):
    found = fresh_ranks(2, environment={"SYMM_OVERLAP_CHECK": None}).run(2, watch)[0]
    text = (ROOT / "docs/architecture.md").read_text()
    for direction, lists in found.items():
        listed = "\n".join([f"the tensor's path, {direction} (* a return):", *call_path.path_lines(lists["tensor"])])
        assert f"{listed}\n" in text, RENEW
        assert call_path.returns(lists["tensor"]) <= 6
        for what, files in lists.items():
            now = f"{len(set(files))} files, {call_path.returns(files)} returns"
            assert re.search(rf"\| {what}, {direction} \|[^|]*\| {now} \|", text), f"{what}: {now}. {RENEW}"


@pytest.mark.parametrize(
    ("entries", "count"), [("a a b", 0), ("a b a", 1), ("a b b a b", 2), ("a b c", 0), ("a b c b b a", 2)]
)
def test_returns_are_entries_of_files_that_were_left(entries, count):
    assert call_path.returns(call_path.collapsed(entries.split())) == count
