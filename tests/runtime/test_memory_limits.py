"""A request for more shared memory than there is fails before it takes any."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks import Pool, Rank
from tests.runtime.symmetric import allocate

MIB = 1 << 20


@pytest.fixture
def memory_group() -> Iterator[Callable[[int], Path]]:
    """Return a function that makes a cgroup within a cgroup with a limit of memory: ``memory_group(bytes)``.

    Skips the test if that is not allowed.
    """
    made: list[Path] = []

    def make_group(nbytes: int) -> Path:
        one = Path("/sys/fs/cgroup/memory").is_dir()  # version 1
        root = Path("/sys/fs/cgroup/memory" if one else "/sys/fs/cgroup")
        outer = root / f"symm_overlap_{os.getpid()}"
        try:
            for group in (outer, outer / "inner"):
                group.mkdir()
                made.append(group)
            (outer / ("memory.limit_in_bytes" if one else "memory.max")).write_text(str(nbytes))
        except OSError as error:
            pytest.skip(f"cgroups cannot be made here: {error}")
        return outer / "inner"

    yield make_group
    for group in reversed(made):
        group.rmdir()


def test_more_than_there_is_is_refused_before_any_of_it_is_taken(fresh_ranks: Callable[..., Pool]) -> None:
    """Otherwise the kernel would end processes, of this program or of others."""
    began = time.monotonic()
    ((kind, message),) = fresh_ranks(1).run(1, allocate, 1 << 50)
    assert time.monotonic() - began < 20
    assert kind == "RuntimeError"
    assert re.search(
        r"asked for 1073741824\.0 MiB .*/dev/shm has .* free of .*, of which at most .* can be had", message
    )


def allocate_in_group(me: Rank, group: Path, nbytes: int, cached: Path) -> list[tuple[str, str]]:
    """Allocate in a cgroup: much, and as much as fits only if the kernel drops what it keeps of a file."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    with cached.open("wb") as file:
        for _ in range(nbytes // 2 // MIB):
            file.write(bytes(MIB))
        file.flush()
        os.fsync(file.fileno())
    return [allocate(me, size) for size in (2 * nbytes, nbytes * 3 // 4)]


def test_more_than_a_cgroup_allows_is_refused(
    memory_group: Callable[[int], Path], fresh_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    """Otherwise the kernel would end a process of the container or job."""
    group = memory_group(256 * MIB)
    (((kind, message), fits),) = fresh_ranks(1).run(1, allocate_in_group, group, 256 * MIB, tmp_path / "cached")
    assert kind == "RuntimeError"
    assert re.search(r"asked for 512\.0 MiB .* of which at most 2[0-5]\d\.\d MiB can be had", message)
    assert "raise the memory limit of the container or job" in message
    assert fits == ("", "")
