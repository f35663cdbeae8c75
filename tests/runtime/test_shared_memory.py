"""Shared memory: it is private and has no name, it is freed, it may be large, and a failed allocation says why."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from symm_overlap import _C
from symm_overlap._torch import symm_mem
from tests.ranks import Pool, Rank
from tests.runtime.symmetric import allocate, error_of, make, shared_files, shared_mappings
from tests.transforms import make_room

MIB = 1 << 20


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[int], str]]:
    """Return a function that mounts a small file system for shared memory: ``tmpfs(bytes)`` returns its folder.

    Skips the test if mounting is not allowed.
    """
    mounted: list[str] = []

    def mount(nbytes: int) -> str:
        folder = tmp_path / f"shm{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"mounting a tmpfs is not allowed here: {done.stderr.strip()}")
        mounted.append(str(folder))
        return mounted[-1]

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


def used(folder: str) -> int:
    """Return the bytes in use on the file system of this folder."""
    fs = os.statvfs(folder)
    return (fs.f_blocks - fs.f_bfree) * fs.f_frsize


def private_and_nameless(me: Rank) -> None:
    kept = [make(me.group, 1000) for _ in range(3)]
    files = shared_files()
    assert len(files) >= len(kept)
    assert {oct(file.st_mode & 0o777) for file in files} == {"0o600"}
    assert {file.st_nlink for file in files} == {0}
    for mapping in shared_mappings():
        assert mapping.rstrip().endswith("(deleted)"), mapping
    kept[0][1].barrier()


def memory_comes_back(me: Rank, folder: str) -> None:
    def everyone_has_done_so() -> None:
        _C.exchange(me.group_name, "step of a test", "")

    make(me.group, 1)  # the first call does imports
    everyone_has_done_so()
    before = used(folder), len(shared_mappings(folder))
    everyone_has_done_so()
    tensor, handle = make(me.group, 4 * MIB, dtype=torch.uint8)
    everyone_has_done_so()
    assert used(folder) >= before[0] + 4 * MIB * me.world
    view = handle.get_buffer((me.rank + 1) % me.world, (4 * MIB,), torch.uint8)
    tensor.fill_(me.rank + 1)
    handle.barrier()
    del tensor
    everyone_has_done_so()
    assert (view == (me.rank + 1) % me.world + 1).all(), "the handle keeps the memory alive"
    if me.rank == 0:
        del handle, view
    everyone_has_done_so()
    if me.rank == 1:
        assert (view == (me.rank + 1) % me.world + 1).all(), "a peer's handle keeps it alive after the owner frees it"
        del handle, view
    everyone_has_done_so()
    assert (used(folder), len(shared_mappings(folder))) == before


def allocate_and_sleep(me: Rank) -> None:
    kept = make(me.group, 4 * MIB, dtype=torch.uint8)
    kept[1].barrier()
    time.sleep(3600)


def pad_without_room(me: Rank, full: str) -> tuple[str, str, float]:
    """All ranks have room for the tensor, but rank 1 has none for the signal pad."""
    if me.rank == 1:
        os.environ["SYMM_OVERLAP_SHM_DIR"] = full  # read at the first allocation
    tensor = symm_mem.empty(MIB, dtype=torch.uint8, device="cpu")
    return error_of(symm_mem.rendezvous, tensor, me.group)


def lane_without_room(me: Rank, full: str) -> tuple[str, str, float]:
    if me.rank == 1:
        os.environ["SYMM_OVERLAP_SHM_DIR"] = full
    return error_of(make_room, me.group, 4 * MIB)


def more_than_two_gib(me: Rank, nbytes: int) -> None:
    tensor, handle = make(me.group, nbytes, dtype=torch.uint8)
    tensor[-1] = me.rank + 1
    tensor[(1 << 31) + 5] = me.rank + 11
    handle.barrier()
    peer = (me.rank + 1) % me.world
    assert handle.buffer_size == nbytes
    assert handle.get_buffer(peer, (1,), torch.uint8, nbytes - 1) == peer + 1
    assert handle.get_buffer(peer, (nbytes,), torch.uint8)[(1 << 31) + 5] == peer + 11
    handle.barrier()


def test_memory_is_private_and_has_no_name(ranks: Pool) -> None:
    ranks.run(2, private_and_nameless)


def test_freed_memory_is_given_back_once_nobody_holds_it(
    fresh_ranks: Callable[..., Pool], tmpfs: Callable[[int], str]
) -> None:
    folder = tmpfs(32 * MIB)
    pool = fresh_ranks(2, environment={"SYMM_OVERLAP_SHM_DIR": folder})
    pool.run(2, memory_comes_back, folder)


def test_killed_ranks_give_their_memory_back_and_never_had_names(
    fresh_ranks: Callable[..., Pool], tmpfs: Callable[[int], str]
) -> None:
    folder = tmpfs(32 * MIB)
    pool = fresh_ranks(2, environment={"SYMM_OVERLAP_SHM_DIR": folder})
    pool.pid(0)
    names, watching = set(), threading.Event()

    def watch() -> None:
        while not watching.is_set():
            names.update(os.listdir(folder))

    watcher = threading.Thread(target=watch)
    watcher.start()
    pool.submit((0, 1), allocate_and_sleep)
    deadline = time.monotonic() + 30
    while used(folder) < 8 * MIB and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert used(folder) >= 8 * MIB
    os.kill(pool.pid(0), signal.SIGKILL)
    pool.kill()
    watching.set()
    watcher.join()
    assert used(folder) == 0
    assert not names


def test_a_full_file_system_is_refused_with_what_was_asked_and_what_there_is(
    fresh_ranks: Callable[..., Pool], tmpfs: Callable[[int], str]
) -> None:
    """If the file system is full, the error says how much was requested and how much is free."""
    folder = tmpfs(2 * MIB)
    pool = fresh_ranks(1, environment={"SYMM_OVERLAP_SHM_DIR": folder})
    ((kind, message),) = pool.run(1, allocate, 3 * MIB)
    assert kind == "RuntimeError"
    assert "asked for 3.0 MiB (3145728 bytes) of shared memory for a symmetric tensor" in message
    assert f"{folder} has 2.0 MiB free of 2.0 MiB" in message
    assert f"remount,size=... {folder}" in message
    assert "SYMM_OVERLAP_SHM_DIR" in message


def with_small_files(me: Rank) -> tuple[str, str]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, resource.RLIM_INFINITY))
    return allocate(me, 9 * MIB)


def test_a_limit_of_the_size_of_files_is_named(fresh_ranks: Callable[..., Pool]) -> None:
    ((kind, message),) = fresh_ranks(1).run(1, with_small_files)
    assert kind == "RuntimeError"
    assert message.endswith("but files of this process cannot be that large (ulimit -f)")


def without_fallocate(me: Rank) -> tuple[str, str]:
    """Allocate under a filter of system calls (BPF) that answers fallocate with EPERM, as sandboxes do."""
    load, equal, give = 0x20, 0x15, 0x06  # opcodes of BPF
    number, forbid, allow = 285, 0x50000 | errno.EPERM, 0x7FFF0000
    code = [(load, 0, 0, 0), (equal, 0, 1, number), (give, 0, 0, forbid), (give, 0, 0, allow)]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(packed)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges, which lets any user set a filter
    assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
    return allocate(me, MIB)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of fallocate is that of x86-64")
def test_a_sandbox_that_forbids_to_reserve_memory_is_named(fresh_ranks: Callable[..., Pool]) -> None:
    ((kind, message),) = fresh_ranks(1).run(1, without_fallocate)
    assert kind == "RuntimeError"
    assert "may not reserve space in /dev/shm (Operation not permitted)" in message
    assert message.endswith("allow fallocate.")


def test_a_folder_that_cannot_hold_memory_is_named(fresh_ranks: Callable[..., Pool]) -> None:
    pool = fresh_ranks(1, environment={"SYMM_OVERLAP_SHM_DIR": "/no/such/folder"})
    ((kind, message),) = pool.run(1, allocate, MIB)
    assert kind == "RuntimeError"
    assert "cannot create 1.0 MiB of shared memory for a symmetric tensor in /no/such/folder: No such file" in message
    assert "set SYMM_OVERLAP_SHM_DIR to one" in message


@pytest.mark.parametrize("what", [pad_without_room, lane_without_room])
def test_a_rank_without_room_tells_the_others(
    fresh_ranks: Callable[..., Pool], tmpfs: Callable[[int], str], what: Callable[..., object]
) -> None:
    found = fresh_ranks(3).run(3, what, tmpfs(MIB))
    for rank, (kind, message, seconds) in enumerate(found):
        assert kind == ("RuntimeError" if rank == 1 else "DistBackendError")
        assert ("rank 1 failed: " in message) == (rank != 1)
        assert "asked for " in message
        assert "set SYMM_OVERLAP_SHM_DIR to one with room" in message
        assert "Exception raised from" not in message, "no C++ stack"
        assert seconds < 20


@pytest.mark.slow
def test_allocations_over_two_gib_work_to_the_last_byte(ranks: Pool) -> None:
    nbytes = (1 << 31) + 4099
    fs = os.statvfs("/dev/shm")
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = 1024 * int(meminfo["MemAvailable"].split()[0])
    if min(fs.f_bavail * fs.f_frsize, available) < 2.5 * nbytes:
        pytest.skip(f"needs 5 GiB of memory and of /dev/shm; there are {available >> 20} MiB")
    ranks.run(2, more_than_two_gib, nbytes, timeout=240)  # a machine may need long to provide so much memory
