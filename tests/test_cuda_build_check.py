"""Tests that cuda_build_check finds the images in compiled modules. They use made-up modules and no CUDA build."""

from __future__ import annotations

import pytest

from tests.cuda_build_check import ENTRY, FATBIN_HEADER, MACHINE_CODE, PTX, images_of_each_file, wanted_images


def fat_binary(*images: tuple[int, int]) -> bytes:
    """Return a fat binary with an entry for each (kind, architecture), each with a few bytes of code."""
    entries = b""
    for kind, architecture in images:
        code = bytes(8 + architecture % 5)
        header = 64
        entries += ENTRY.pack(kind, 0x101, header, len(code), architecture).ljust(header, b"\0") + code
    return FATBIN_HEADER.pack(0xBA55ED50, 1, FATBIN_HEADER.size, len(entries)) + entries


@pytest.mark.parametrize(
    ("architectures", "wanted"),
    [
        ("8.0;9.0;10.0+PTX", {"sm_80", "sm_90", "sm_100", "compute_100"}),
        ("9.0a 12.0", {"sm_90a", "sm_120"}),
    ],
)
def test_a_list_of_architectures_asks_for_machine_code_and_ptx(architectures: str, wanted: set[str]) -> None:
    assert wanted_images(architectures) == wanted


def test_every_fat_binary_of_a_module_is_found_with_its_images() -> None:
    module = b"\x7fELF..." + fat_binary((MACHINE_CODE, 80), (MACHINE_CODE, 90), (PTX, 90)) + b"between" + fat_binary()
    module += fat_binary((MACHINE_CODE, 100)) + b"end"
    assert list(images_of_each_file(module)) == [{"sm_80", "sm_90", "compute_90"}, {"sm_100"}]
    assert not list(images_of_each_file(b"nothing"))
