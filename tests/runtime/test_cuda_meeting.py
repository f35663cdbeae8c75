"""The compiled kernels in which ranks meet. Needs nvcc, but no GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from symm_overlap import _C
from tests.runtime.ptx import behind_exits, compiled, innermost_loop, kernels

pytestmark = pytest.mark.skipif(not _C.with_cuda, reason="the extension was built without CUDA")

SOURCE = "csrc/cuda/meeting.cu"
KERNELS = 6 * 2 + 1  # sums of four dtypes, two of them also in float32, in vectors and one by one, and a gather
MOST_REGISTERS = 64  # enough for loads in flight, and 4 blocks of 256 threads fit on a multiprocessor


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the PTX of each kernel, by its mangled name."""
    file = tmp_path_factory.mktemp("ptx") / "meeting.ptx"
    compiled(SOURCE, "-arch=compute_90", "-ptx", "-o", str(file))
    found = kernels(file.read_text())
    assert len(found) == KERNELS
    return found


def test_what_peers_write_during_the_kernel_is_not_read_as_if_nobody_did(code: dict[str, list[str]]) -> None:
    """Memory that peers write during the kernel is not read through the non-coherent cache."""
    for lines in code.values():
        assert not [line for line in lines if "ld.global.nc" in line]  # an acquire does not invalidate that cache


def test_a_poll_acquires_nothing_and_its_end_does(code: dict[str, list[str]]) -> None:
    """A polling loop has only relaxed loads. An acquire follows when the signal, or a dead peer's mark, is found."""
    for lines in code.values():
        poll = innermost_loop(lines, "nanosleep")
        assert any("ld.relaxed.sys.u32" in lines[index] for index in poll)
        assert not [index for index in poll if re.search("acquire|membar|fence|atom", lines[index])]
        # One after the signal was found, and one after the mark of a dead peer was found.
        assert len([line for line in behind_exits(lines, poll) if line.startswith("ld.acquire.sys.u32")]) == 2


def test_the_last_block_is_told_apart_behind_a_fence_at_system_scope(code: dict[str, list[str]]) -> None:
    """A peer that sees the signal of the last block must also see what all other blocks have written."""
    for name, lines in code.items():
        tickets = [index for index, line in enumerate(lines) if re.match(r"atom\.global\.add\.u32", line)]
        assert len(tickets) == (2 if "meet_and_sum" in name else 1), name
        last = tickets[-1]
        fences = [index for index, line in enumerate(lines) if line.startswith(("membar.sys", "fence.acq_rel.sys"))]
        assert any(index < last and last - index < 12 for index in fences), name
        assert any(index > last and index - last < 12 for index in fences), name


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_nothing_is_spilled(architecture: int, tmp_path: Path) -> None:
    """No kernel spills registers, and none uses more than the limit."""
    report = compiled(SOURCE, f"-arch=sm_{architecture}", "-cubin", "-Xptxas", "-v", "-o", str(tmp_path / "cubin"))
    assert report.count("0 bytes spill stores, 0 bytes spill loads") == KERNELS, report
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", report)]
    assert len(registers) == KERNELS
    assert max(registers) <= MOST_REGISTERS
