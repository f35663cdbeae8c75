"""The compiled kernels that signal and wait: memory scopes, memory orders and registers. Needs nvcc, but no GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from symm_overlap import _C
from tests.runtime.ptx import compiled, kernels, loops

pytestmark = pytest.mark.skipif(not _C.with_cuda, reason="the extension was built without CUDA")

SOURCE = "csrc/cuda/signal_kernels.cu"
KERNELS = {f"{name}_kernel" for name in ("signal", "wait", "barrier", "give_up")}
ORDERED = re.compile(r"(ld|st)\.(acquire|release|relaxed)\.|membar|fence|atom")
MOST_REGISTERS = 32  # a wait may run at the same time as a matmul that uses nearly all of a multiprocessor


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the PTX of each kernel, by its name."""
    file = tmp_path_factory.mktemp("ptx") / "signal_kernels.ptx"
    compiled(SOURCE, "-arch=compute_90", "-ptx", "-o", str(file))
    found = kernels(file.read_text())
    return {name: lines for mangled, lines in found.items() for name in re.findall(r"\d\d([a-z_]+_kernel)E", mangled)}


def test_every_order_is_at_system_scope(code: dict[str, list[str]]) -> None:
    """Every load, store and fence with a memory order has system scope, so that it orders accesses of other GPUs."""
    assert set(code) == KERNELS
    for lines in code.values():
        ordered = [line for line in lines if ORDERED.search(line)]
        assert ordered
        for line in ordered:
            # The only atomic marks the lane as failed. It is in this GPU's own memory, after a fence at system scope.
            assert ".sys" in line or "atom.global.cas" in line or "atom.relaxed" in line, line
    assert any("st.release.sys.u32" in line for line in code["signal_kernel"])


def test_a_poll_acquires_nothing_and_the_end_of_a_wait_does(code: dict[str, list[str]]) -> None:
    """A polling loop has only relaxed loads, and the wait acquires after the loop."""
    polls = [loop for loop in loops(code["wait_kernel"]) if any("ld.relaxed.sys.u32" in line for line in loop)]
    assert len(polls) == 1
    assert any("nanosleep" in line for line in polls[0])
    assert not [line for line in polls[0] if re.search("acquire|membar|fence|atom", line)]
    assert any("ld.acquire.sys.u32" in line for line in code["wait_kernel"])


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_waits_have_few_registers_and_no_shared_memory(architecture: int, tmp_path: Path) -> None:
    report = compiled(SOURCE, f"-arch=sm_{architecture}", "-cubin", "-Xptxas", "-v", "-o", str(tmp_path / "cubin"))
    used = re.findall(r"\d\d([a-z_]+_kernel)E\S*$.*?Used (\d+) registers([^\n]*)", report, re.DOTALL | re.MULTILINE)
    assert {name for name, *_ in used} == KERNELS, report
    for name, registers, rest in used:
        assert int(registers) <= MOST_REGISTERS, f"{name}: {registers}"
        assert "smem" not in rest
