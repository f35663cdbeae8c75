"""Start the ranks of a benchmark on this host and pass each one a `Rank`.

The parent hosts the store, so the caller need not choose a port. If a rank raises, all ranks end and its traceback is
shown.
"""

from __future__ import annotations

import datetime
import mmap
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

_LINE = 64  # bytes; each rank has its own cache line, so that ranks do not compete for a line
_WORD = 8


class StartLine:
    """A barrier that lets the ranks of one host start within about a microsecond, without any of the measured code."""

    def __init__(self, path: Path, rank: int, world: int, timeout_s: float = 300.0) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LINE * world)
        self._slots = memoryview(self._map).cast("Q")
        self._rank, self._world, self._timeout_s = rank, world, timeout_s
        self._round = 0

    @staticmethod
    def create(path: Path, world: int) -> None:
        path.write_bytes(bytes(_LINE * world))

    def wait(self) -> None:
        """Return once every rank has called `wait` as often as this one."""
        slots, stride = self._slots, _LINE // _WORD
        self._round += 1
        slots[self._rank * stride] = self._round
        spins = 0
        deadline = 0.0
        for peer in range(self._world):
            while slots[peer * stride] < self._round:
                spins += 1
                if spins > 2000:  # there may be more ranks than cores: let the others run
                    os.sched_yield()
                    deadline = deadline or time.monotonic() + self._timeout_s
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"rank {peer} of {self._world} did not reach start {self._round}")


@dataclass(frozen=True)
class Rank:
    """One rank of a benchmark: its number, device, process group and start line."""

    rank: int
    world: int
    device: torch.device
    backend: str
    start: StartLine

    @property
    def group(self) -> dist.ProcessGroup:
        group = dist.group.WORLD
        assert group is not None
        return group

    @property
    def group_name(self) -> str:
        return str(self.group.group_name)

    def all(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. Every rank must call this."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values


def launch(fn: Callable[..., Any], world: int, device: str, *args: Any, threads: int = 1) -> list[Any]:
    """Run ``fn(rank, *args)`` in `world` new processes and return their results, by rank.

    Under torchrun, this process is already one of the ranks, and the list contains only its own result.

    `fn` must be a module-level function. On CPU the group uses gloo on the loopback interface, and every rank computes
    with `threads` threads. On CUDA it uses NCCL with one GPU for each rank. If there are more ranks than GPUs, it uses
    gloo, and ranks share GPUs.
    """
    if world < 1:
        raise ValueError(f"world is {world}; give 1 or more")
    if under_torchrun():
        return [_as_rank_of_torchrun(world, device, threads, fn, args)]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="symm_overlap_bench_") as folder:
        StartLine.create(Path(folder, "start"), world)
        start_processes(
            _rank_main, (world, device, store.port, folder, threads, fn, args), nprocs=world, start_method="spawn"
        )
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(world)]


def under_torchrun() -> bool:
    """True if torchrun started this process as a rank."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()


def first_rank() -> bool:
    """True if this process prints: it is rank 0 under torchrun, or torchrun did not start it."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def leave(code: int) -> NoReturn:
    """End a command with this exit code."""
    if under_torchrun():
        _exit(code)
    sys.exit(code)


def _exit(code: int) -> NoReturn:
    """End a rank without Python's finalisation, during which a thread of gloo may still release a tensor and would then
    abort the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _as_rank_of_torchrun(world: int, device: str, threads: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if (size, local) != (world, world):
        raise ValueError(f"torchrun has {size} ranks, {local} of them on this host: all {world} must be on this host")
    torch.set_num_threads(threads)
    backend, where = _backend_and_device(rank, world, device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=10))
    try:
        folder = [tempfile.mkdtemp(prefix="symm_overlap_bench_") if rank == 0 else ""]
        dist.broadcast_object_list(folder)
        path = Path(folder[0], "start")
        if rank == 0:
            StartLine.create(path, world)
        dist.barrier()
        start = StartLine(path, rank, world)
        dist.barrier()  # protects the folder from removal before every rank has mapped the file
        if rank == 0:
            shutil.rmtree(folder[0])
        result = fn(Rank(rank, world, where, backend, start), *args)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()


def _rank_main(
    rank: int,
    world: int,
    device: str,
    port: int,
    folder: str,
    threads: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    backend, where = _backend_and_device(rank, world, device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    store = TCPStore("127.0.0.1", port, is_master=False)
    timeout = datetime.timedelta(minutes=10)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        result = fn(Rank(rank, world, where, backend, StartLine(Path(folder, "start"), rank, world)), *args)
        Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()  # protects peers: a rank that ends early would close its shared memory and sockets
    finally:
        dist.destroy_process_group()
    _exit(0)


def _backend_and_device(rank: int, world: int, device: str) -> tuple[str, torch.device]:
    if device == "cpu":
        return "gloo", torch.device("cpu")
    if device != "cuda":
        raise ValueError(f"device is {device!r}; give 'cpu' or 'cuda'")
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError("device is 'cuda', but torch sees no GPU; run with --device cpu")
    if count >= world:
        return "nccl", torch.device("cuda", rank)
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    return "gloo", torch.device("cuda", rank % count)
