"""Gates, at which streams wait without a kernel: csrc/common/pending_gates.h and csrc/cuda/signal.cuh on the host."""

from pathlib import Path

import pytest

from tests.runtime.host_program import HOST, compile_program, run_program, thread_sanitizer


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gates")
    return compile_program(HOST / "gates.cpp", folder / "gates", thread_sanitizer(folder))


def test_behind_an_open_gate_the_signal_has_come(program: Path) -> None:
    run_program(program, "opened")


def test_a_wait_that_is_handed_over_comes_to_its_deadline(program: Path) -> None:
    run_program(program, "handed over")


def test_the_host_knows_which_gates_may_be_shut(program: Path) -> None:
    run_program(program, "pending")
