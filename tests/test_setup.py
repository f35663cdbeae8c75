"""Tests of setup.py: the sources it compiles, its error messages, and that a wheel works outside of the source tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TORCH_HAS_CUDA = torch.version.cuda is not None

# Runs setup.py up to its call of setuptools.setup, and prints the arguments of that call.
READ_SETUP = """
import json, os, runpy, setuptools
def compiled(extension):
    found = []
    for source in extension.sources:
        if source.startswith("build"):  # it only includes sources
            found += ["csrc/" + line.split('"')[1] for line in open(source)]
        else:
            found.append(source)
    return found
def show(ext_modules, cmdclass):
    e, simulators = ext_modules
    assert all(source.startswith("csrc/sim/") for source in compiled(simulators)), simulators.sources
    print(json.dumps({"sources": compiled(e), "macros": [name for name, _ in e.define_macros],
                      "libraries": e.libraries,
                      "cuda_home": os.environ.get("CUDA_HOME"), "archs": os.environ.get("TORCH_CUDA_ARCH_LIST")}))
setuptools.setup = show
runpy.run_path("setup.py", run_name="__main__")
"""


def run_setup(environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    names = ("SYMM_OVERLAP_CUDA", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", READ_SETUP]
    return subprocess.run(command, cwd=ROOT, env=clean | environment, capture_output=True, text=True, timeout=120)


def fake_toolkit(root: Path, *, headers: bool) -> Path:
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "nvcc").write_text("#!/bin/sh\n")
    (root / "bin" / "nvcc").chmod(0o755)
    if headers:
        (root / "include").mkdir()
        (root / "include" / "cuda_runtime.h").touch()
    return root


def test_without_cuda_only_cpu_sources_are_compiled() -> None:
    result = run_setup({"SYMM_OVERLAP_CUDA": "0"})
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    assert "csrc/module.cpp" in shown["sources"]
    assert all(str(each.relative_to(ROOT)) in shown["sources"] for each in (ROOT / "csrc" / "cpu").glob("*.cpp"))
    assert not any("cuda" in source for source in shown["sources"])
    assert shown["macros"] == []
    assert "rt" not in shown["libraries"], "the library rt is linked, but none of its functions is used"


@pytest.mark.skipif(not TORCH_HAS_CUDA, reason="torch was built without CUDA")
def test_with_cuda_the_toolkit_that_has_headers_is_used_for_three_architectures_and_ptx(tmp_path: Path) -> None:
    wrapper = fake_toolkit(tmp_path / "wrapper", headers=False)
    toolkit = fake_toolkit(tmp_path / "toolkit", headers=True)
    (wrapper / "bin" / "nvcc").unlink()
    (wrapper / "bin" / "nvcc").symlink_to(toolkit / "bin" / "nvcc")
    path = f"{wrapper / 'bin'}:{os.environ['PATH']}"
    result = run_setup({"SYMM_OVERLAP_CUDA": "1", "PATH": path})
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    assert shown["cuda_home"] == str(toolkit)
    assert shown["archs"] == "8.0;9.0;10.0+PTX"
    assert shown["macros"] == ["SYMM_OVERLAP_WITH_CUDA"]
    assert {Path(source).suffix for source in shown["sources"] if "cuda" in source} == {".cpp", ".cu"}


@pytest.mark.skipif(not TORCH_HAS_CUDA, reason="torch was built without CUDA")
@pytest.mark.parametrize("choice", ["0", "1", None])
def test_a_toolkit_without_headers_is_none(tmp_path: Path, choice: str | None) -> None:
    home = {"CUDA_HOME": str(fake_toolkit(tmp_path / "toolkit", headers=False))}
    result = run_setup(home if choice is None else home | {"SYMM_OVERLAP_CUDA": choice})
    if choice == "1":
        assert result.returncode != 0
        assert "there is no CUDA toolkit" in result.stderr
    else:
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["macros"] == []


@pytest.mark.skipif(TORCH_HAS_CUDA, reason="torch was built with CUDA")
@pytest.mark.slow
def test_cuda_asked_for_with_a_cpu_torch_is_refused() -> None:
    result = run_setup({"SYMM_OVERLAP_CUDA": "1"})
    assert result.returncode != 0
    assert f"torch {torch.__version__} was built without CUDA" in result.stderr


@pytest.mark.slow
def test_a_choice_that_is_neither_0_nor_1_is_refused() -> None:
    result = run_setup({"SYMM_OVERLAP_CUDA": "yes"})
    assert result.returncode != 0
    assert "SYMM_OVERLAP_CUDA='yes': allowed are 0" in result.stderr


def test_a_python_without_torch_is_told_to_install_it_first(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('none here')")
    result = run_setup({"PYTHONPATH": str(tmp_path)})
    assert result.returncode != 0
    assert "this Python has no torch" in result.stderr
    assert "pip install --no-build-isolation ." in result.stderr


@pytest.mark.slow
def test_a_wheel_has_the_whole_package_and_works_in_another_folder(tmp_path: Path) -> None:
    # Without isolation and with the existing object files, so that the build links but does not compile again.
    deleted = (
        ROOT / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "symm_overlap/deleted.py"
    )
    deleted.parent.mkdir(parents=True, exist_ok=True)
    deleted.touch()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=280)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    python = {name for name in names if name.endswith(".py")}
    assert python == {str(file.relative_to(ROOT)) for file in (ROOT / "symm_overlap").rglob("*.py")}
    assert {"symm_overlap/_C.pyi", "symm_overlap/_sim.pyi", "symm_overlap/py.typed"} < set(names)
    assert sorted(name for name in names if name.endswith(".so")) == [
        f"symm_overlap/{module}{sysconfig.get_config_var('EXT_SUFFIX')}" for module in ("_C", "_sim")
    ]

    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, timeout=60)
    program = (
        "import symm_overlap, torch.distributed._symmetric_memory as s; from importlib.metadata import version\n"
        "s.empty(8, device='cpu'); print(symm_overlap.__file__, version('symm-overlap'))"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    installed = [[sys.executable, "-c", program], [str(site / "bin" / "symm-overlap"), "--help"]]
    results = [
        subprocess.run(
            command,
            cwd=elsewhere,
            env=os.environ | {"PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        for command in installed
    ]
    for result in results:
        assert result.returncode == 0, result.stderr
    assert results[0].stdout.split() == [str(site / "symm_overlap" / "__init__.py"), "0.1.0"]
    assert "train" in results[1].stdout


IMPORT_WITHOUT = """
import importlib.abc, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "symm_overlap._C":
            raise ImportError(sys.argv[1])
sys.meta_path.insert(0, Finder())
import symm_overlap
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "why"),
    [("_C.so: undefined symbol: _ZN3c10", "it was compiled for another torch"), ("No module _C", "it does not load")],
)
def test_an_extension_for_another_torch_is_named(error: str, why: str) -> None:
    command = [sys.executable, "-c", IMPORT_WITHOUT, error]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    last = result.stderr.splitlines()[-1]
    assert f"cannot be used with torch {torch.__version__}, because {why}. Install symm_overlap again" in last
    assert last.endswith(f"({error})")
