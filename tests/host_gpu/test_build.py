"""Tests of the host GPU: every kernel of csrc/cuda has a host form, and all tests that are skipped exist."""

from __future__ import annotations

import re

import pytest

from tests.host_gpu.build import INSTANCES, ROOT, host_source
from tests.host_gpu.selection import SKIPPED

SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))


def test_every_kernel_has_a_host_form() -> None:
    assert SOURCES
    for path in SOURCES:
        source = path.read_text()
        names = re.findall(r"(\w+)\(", "".join(re.findall(r"__global__[^{]*", source)))
        kernels = [name for name in names if name.endswith("_kernel")]
        made = host_source(source)
        assert len(kernels) == source.count("__global__"), f"{path.name}: names of kernels must end in _kernel"
        assert "<<<" not in made
        for name in kernels:
            forms = re.findall(rf"HostForm<&{name}\b", made)
            assert len(forms) == len(INSTANCES.get(name, [name])), name


def test_a_template_needs_its_instances() -> None:
    with pytest.raises(KeyError, match="new_kernel"):
        host_source("template <typename T>\n__global__ void new_kernel(T* x) {}")


def test_what_is_skipped_exists() -> None:
    for key in SKIPPED:
        file, name = key.split("::")
        assert f"def {name}(" in (ROOT / "tests" / "gpu" / file).read_text()
