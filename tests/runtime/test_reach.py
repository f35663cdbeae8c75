"""Whether ranks can reach each other's memory: from facts, and on CPU by a trial. If not, they do without."""

from __future__ import annotations

import ctypes
import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import symm_overlap
from symm_overlap.runtime.cpu import backend
from symm_overlap.runtime.cpu.backend import CpuBackend
from symm_overlap.runtime.topology import _facts, in_reach
from tests.ranks import Pool, Rank
from tests.runtime.test_open_files import spare_files


def lose_access() -> None:
    """Root loses its capabilities, and with them the access to processes that have more. Another user's process becomes
    one whose memory others must not read, as after a change of user.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0:
        version_3, no_capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        done = libc.capset(version_3, no_capabilities)
    else:
        done = libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    assert done == 0, os.strerror(ctypes.get_errno())


def require_c10d(me: Rank) -> None:
    found = symm_overlap.explain("all_gather_matmul", m=2 * me.world, n=3, k=8, group=me.group)
    assert (found.path, found.reason) == (
        "c10d",
        "the ranks are on several hosts, or cannot map each other's memory",
    )
    x, weight = torch.full((2, 8), me.rank + 1.0), torch.ones(8, 3)
    _, (product,) = symm_overlap.all_gather_matmul(x, [weight], 0, me.group)
    expected = torch.arange(1.0, me.world + 1).repeat_interleave(2)[:, None].expand(-1, 3) * 8
    assert torch.equal(product, expected)


def denied(me: Rank) -> list[str]:
    if me.rank == 0:
        lose_access()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        symm_overlap.all_reduce(torch.ones(2), "sum", me.group)
    require_c10d(me)
    return [str(warning.message) for warning in caught]


def test_ranks_that_may_not_open_memory_of_others_use_c10d(fresh_ranks: Callable[..., Pool]) -> None:
    found = fresh_ranks(3).run(3, denied)
    failed = [0] if os.geteuid() == 0 else [1, 2]
    for rank, messages in enumerate(found):
        told = [each for each in messages if "cannot open memory of rank" in each]
        assert len(told) == (rank in failed), messages
        assert all(f"rank {rank} of group" in each and "Permission denied" in each for each in told)


def hidden(me: Rank) -> None:
    read = Path.read_text

    def refuse(path: Path, *args: object) -> str:
        if path.name == "boot_id":
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(path)

    with mock.patch.object(Path, "read_text", refuse):
        symm_overlap.all_reduce(torch.ones(2), "sum", me.group)
    require_c10d(me)


def test_ranks_that_do_not_know_their_host_use_c10d(fresh_ranks: Callable[..., Pool]) -> None:
    fresh_ranks(2).run(2, hidden)


def out_of_files(me: Rank) -> None:
    def fails(self: CpuBackend, offer: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    with (
        mock.patch.object(CpuBackend, "take", fails if me.rank == 1 else CpuBackend.take),
        pytest.raises(RuntimeError, match=r"rank 1: .*Too many open files"),
    ):
        symm_overlap.all_reduce(torch.ones(2), "sum", me.group)
    assert torch.equal(symm_overlap.all_reduce(torch.ones(2), "sum", me.group), torch.full((2,), 2.0))


def test_a_rank_that_cannot_try_tells_the_others(fresh_ranks: Callable[..., Pool]) -> None:
    fresh_ranks(2).run(2, out_of_files)


def test_what_is_offered_is_found_and_another_file_is_not(tmp_path: Path) -> None:
    own = CpuBackend()
    with own.offer() as offer, open(tmp_path / "other", "w") as other:
        assert own.take(offer) == ""
        assert own.take([offer[0], other.fileno(), *offer[2:]]).endswith("is another file here")
        with spare_files(0), pytest.raises(OSError, match="Too many open files"):
            own.take(offer)
    assert "No such file" in own.take(offer)


def test_a_folder_without_nameless_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend._C, "shm_dir", lambda: "/proc")
    with (
        pytest.raises(RuntimeError, match=r"cannot create shared memory in /proc: .*SYMM_OVERLAP_SHM_DIR"),
        CpuBackend().offer(),
    ):
        pass


def test_ranks_are_in_reach_when_each_reaches_the_memory_of_each() -> None:
    """Ranks are in reach of each other if all are on one host and each can access every rank's memory."""
    equal = {"host": "a", "comparing": False}
    cpu = {**equal, "memory": "shared", "reaches": ["shared"], "shares": True}
    assert in_reach([cpu, cpu])
    assert not in_reach([cpu, {**cpu, "host": "b"}])
    gpus = [{**equal, "memory": f"gpu{own}", "reaches": ["gpu0", "gpu1"], "shares": False} for own in range(2)]
    assert in_reach(gpus)
    alone = [{**gpu, "reaches": [gpu["memory"]]} for gpu in gpus]  # each process sees only its own GPU
    assert not in_reach(alone)
    assert not in_reach([gpus[0], alone[1]])


def test_ranks_on_one_gpu_are_in_reach_only_if_torch_lets_them_share_it() -> None:
    gpu = {"host": "a", "comparing": False, "memory": "gpu0", "reaches": ["gpu0"], "shares": True}
    assert in_reach([gpu, gpu])
    assert not in_reach([gpu, {**gpu, "shares": False}])


def test_a_rank_on_a_gpu_tells_of_its_tensors_device_not_of_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank reports facts about the device of its tensors, not about the current CUDA device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"gpu{device}", name=f"GPU {device}")
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, index: (here, index) == (2, 1))
    for value, shares in ((None, False), ("0", False), ("1", True)):
        monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
        if value is not None:
            monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", value)
        for interprets in ("0", "1"):
            monkeypatch.setenv("TRITON_INTERPRET", interprets)
            fact = _facts(torch.device("cuda", 2))
            assert fact["device"] == ("GPU cuda:2", False, interprets == "0")
        assert (fact["memory"], fact["reaches"], fact["shares"]) == ("gpu2", ["gpu1", "gpu2"], shares)
