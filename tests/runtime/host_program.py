"""Compile programs from the headers of csrc. With them, tests check what kernels do without a GPU."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
HOST = Path(__file__).parent / "host"


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a temporary folder shared by all pytest-xdist workers, so each program is compiled once per test run."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


def compile_program(source: Path, binary: Path, *flags: str) -> Path:
    """Compile with the host's compiler, unless the binary already exists. Return the path of the binary.

    Headers in tests/runtime/host replace the headers of csrc with the same name.
    """
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "the extension cannot have been built without a C++ compiler"
    # -g1: sanitizers need line numbers for their reports. Full debug information would take a third of the time.
    # -Wno-unknown-pragmas: headers shared with kernels have pragmas of nvcc, which other compilers do not know.
    command = [compiler, "-std=c++17", "-O1", "-g1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-pthread", *flags]
    with binary.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            subprocess.run([*command, f"-I{HOST}", f"-I{CSRC}", str(source), "-o", str(binary)], check=True)
    return binary


def run_program(binary: Path, *arguments: object) -> str:
    """Run the program and return what it printed. If the program fails, the assertion message shows its output."""
    done = subprocess.run([binary, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{binary.name} {arguments}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def thread_sanitizer(folder: Path) -> str:
    """Return the compiler flag that makes data races errors. Skip the test if such programs do not run here."""
    trivial = folder / "trivial.cpp"
    trivial.write_text("int main() {}\n")
    try:
        subprocess.run([compile_program(trivial, folder / "trivial", "-fsanitize=thread")], check=True)
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"no thread sanitizer on this machine: {error}")
    return "-fsanitize=thread"
