"""The compiled kernels that signal and wait: memory scopes, memory orders and registers. Needs nvcc, but no GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from symm_overlap import _C
from tests.runtime.ptx import compiled, kernels, loops

pytestmark = pytest.mark.skipif(not _C.with_cuda, reason="the extension was built without CUDA")

SOURCES = {
    "csrc/cuda/signal_kernels.cu": ("signal", "wait", "write", "barrier", "give_up"),
    "csrc/cuda/flag_kernels.cu": ("raise_flag", "await_flag", "give_up_flags"),
}
WAITS = "wait_kernel", "await_flag_kernel"
ORDERED = re.compile(r"(ld|st)\.(acquire|release|relaxed)\.|membar|fence|atom")
MOST_REGISTERS = 32  # a wait may run at the same time as a matmul that uses nearly all of a multiprocessor


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the PTX of each kernel, by its name."""
    file, found = tmp_path_factory.mktemp("ptx") / "kernels.ptx", {}
    for source in SOURCES:
        compiled(source, "-arch=compute_90", "-ptx", "-o", str(file))
        found |= kernels(file.read_text())
    return {name: lines for mangled, lines in found.items() for name in re.findall(r"\d\d([a-z_]+_kernel)E", mangled)}


def test_every_order_is_at_system_scope(code: dict[str, list[str]]) -> None:
    """Every load, store and fence with a memory order has system scope, so that it orders accesses of other GPUs."""
    assert set(code) == {f"{name}_kernel" for names in SOURCES.values() for name in names}
    for lines in code.values():
        ordered = [line for line in lines if ORDERED.search(line)]
        assert ordered
        for line in ordered:
            # The only atomic marks the lane as failed. It is in this GPU's own memory, after a fence at system scope.
            assert ".sys" in line or "atom.global.cas" in line or "atom.relaxed" in line, line
    for name in ("signal_kernel", "write_kernel", "raise_flag_kernel", "give_up_flags_kernel"):
        assert any("st.release.sys.u32" in line for line in code[name])


@pytest.mark.parametrize("name", WAITS)
def test_a_poll_acquires_nothing_and_the_end_of_a_wait_does(name: str, code: dict[str, list[str]]) -> None:
    """A polling loop has only relaxed loads, and the wait acquires after the loop."""
    polls = [loop for loop in loops(code[name]) if any("ld.relaxed.sys.u32" in line for line in loop)]
    assert len(polls) == 1
    assert any("nanosleep" in line for line in polls[0])
    assert not [line for line in polls[0] if re.search("acquire|membar|fence|atom", line)]
    assert any("ld.acquire.sys.u32" in line for line in code[name])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_waits_have_few_registers_and_no_shared_memory(source: str, architecture: int, tmp_path: Path) -> None:
    report = compiled(source, f"-arch=sm_{architecture}", "-cubin", "-Xptxas", "-v", "-o", str(tmp_path / "cubin"))
    used = re.findall(r"\d\d([a-z_]+_kernel)E\S*$.*?Used (\d+) registers([^\n]*)", report, re.DOTALL | re.MULTILINE)
    assert {name for name, *_ in used} == {f"{name}_kernel" for name in SOURCES[source]}, report
    for name, registers, rest in used:
        assert int(registers) <= MOST_REGISTERS, f"{name}: {registers}"
        assert "smem" not in rest
