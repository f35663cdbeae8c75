"""Programs compiled from the headers of csrc, for tests of what kernels do that need no GPU."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
HOST = Path(__file__).parent / "host"


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """A temporary folder that all workers of pytest-xdist have: a program is compiled once in a run of the tests."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


def compile_program(source: Path, binary: Path, *flags: str) -> Path:
    """Compile with the host's compiler, unless the binary is there already.

    Headers in tests/runtime/host stand for those of csrc with the same name.
    """
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "the extension cannot have been built without a C++ compiler"
    # Line numbers, for what a sanitizer reports; all that debuggers can show would take a third of the time.
    # nvcc's pragmas, of which others know nothing, are in what is shared with kernels.
    command = [compiler, "-std=c++17", "-O1", "-g1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-pthread", *flags]
    with binary.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            subprocess.run([*command, f"-I{HOST}", f"-I{CSRC}", str(source), "-o", str(binary)], check=True)
    return binary


def run_program(binary: Path, *arguments: object) -> str:
    """Run it and return what it printed; a failure shows that too."""
    done = subprocess.run([binary, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{binary.name} {arguments}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def thread_sanitizer(folder: Path) -> str:
    """The compiler's flag for programs in which data races are errors; skips where such programs do not run."""
    trivial = folder / "trivial.cpp"
    trivial.write_text("int main() {}\n")
    try:
        subprocess.run([compile_program(trivial, folder / "trivial", "-fsanitize=thread")], check=True)
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"no thread sanitizer on this machine: {error}")
    return "-fsanitize=thread"
