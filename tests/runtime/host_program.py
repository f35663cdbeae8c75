"""Programs compiled from the headers of csrc, for tests of what kernels do that need no GPU."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
HOST = Path(__file__).parent / "host"


def compile_program(source: Path, binary: Path, *flags: str) -> Path:
    """Compile with the host's compiler. Headers in tests/runtime/host stand for those of csrc with the same name."""
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "the extension cannot have been built without a C++ compiler"
    command = [compiler, "-std=c++17", "-O1", "-g", "-Wall", "-Werror", "-pthread", *flags]
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
