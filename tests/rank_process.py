"""The program of a rank process of tests/ranks.py: join the process groups, then run test functions one by one."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from symm_overlap.cli.fork_server import end_with_parent

Ranks = tuple[int, ...]
STDERR = 2

COMPILER = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # more would start worker processes, which outlive a rank that is killed
    "TORCHINDUCTOR_VEC_ISA_OK": "0",  # otherwise it compiles ten programs to try every vector extension
}
"""Settings of torch's compiler in every process of the tests."""


@dataclass(frozen=True)
class Rank:
    """The first argument of a test function: this process's place in the group that the function runs on."""

    rank: int
    world: int
    group: dist.ProcessGroup
    device: torch.device
    groups: Mapping[Ranks, dist.ProcessGroup]
    """Every group that this process belongs to, by its global ranks: ``groups[(0, 1, 2)]``."""

    @property
    def group_name(self) -> str:
        return self.group.group_name


@dataclass(frozen=True)
class Setup:
    """The data that a pool passes to each of its processes at the start."""

    size: int
    groups: Sequence[Ranks]
    device: str
    store_port: int
    environment: Mapping[str, str | None]


class QuietGloo(dist.ProcessGroupGloo):
    """The class of all gloo groups in a rank process: they share one network device.

    A device has a thread that wakes up a hundred times a second, and torch creates one for every group. These threads
    took a twentieth of the processor's time.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: object) -> None:
        # torch from 2.14 on also passes `enable_reconfigure`, which is False.
        options = self._Options()
        options._timeout, options._devices = timeout, [network_device()]
        super().__init__(store, rank, size, options)


@cache
def network_device() -> dist.ProcessGroupGloo.Device:
    return dist.ProcessGroupGloo.create_device(interface="lo")


def main(rank: int, setup: Setup, connection: Connection, stacks: str, errors: str) -> None:
    with open(stacks, "w") as stacks_file, open(errors, "a") as errors_file:
        os.dup2(errors_file.fileno(), STDERR)  # where C++ says why it ends the process
        torch._C._set_print_stack_traces_on_fatal_signal(True)  # of every thread, in C++
        # The handlers of faulthandler run first, because those of torch allocate memory and may hang.
        # SIGUSR1 writes every thread's Python stack at C level, so it also works while C++ hangs with the GIL held.
        faulthandler.enable(stacks_file, all_threads=True)
        faulthandler.register(signal.SIGUSR1, stacks_file, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then closes the pool
        end_with_parent()
        for name, value in setup.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        dist.ProcessGroupGloo = dist.distributed_c10d.ProcessGroupGloo = QuietGloo  # type: ignore[misc]
        try:
            groups = join_groups(rank, setup)
        except BaseException:
            send(connection, (False, traceback.format_exc()))
            return
        send(connection, (True, os.getpid()))
        serve(rank, setup, groups, connection)
        dist.destroy_process_group()


def join_groups(rank: int, setup: Setup) -> dict[Ranks, dist.ProcessGroup]:
    torch.set_num_threads(1)
    if setup.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.TCPStore("127.0.0.1", setup.store_port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setup.size)
    everyone = tuple(range(setup.size))
    assert dist.group.WORLD is not None
    groups = {everyone: dist.group.WORLD}
    for members in setup.groups:
        if members != everyone:
            group = dist.new_group(list(members))
            if rank in members:
                groups[members] = group
    return groups


def serve(rank: int, setup: Setup, groups: Mapping[Ranks, dist.ProcessGroup], connection: Connection) -> None:
    """Run the functions that the pool sends, until it closes the connection."""
    device = torch.device(f"cuda:{torch.cuda.current_device()}" if setup.device == "cuda" else "cpu")
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:
            return
        try:
            members, function, args, kwargs = pickle.loads(job)
            me = Rank(members.index(rank), len(members), groups[members], device, groups)
            torch.manual_seed(0)  # so that random numbers do not depend on the functions that ran before
            os.ftruncate(STDERR, 0)  # what earlier functions wrote does not concern this one
            made = groups_made()
            answer = pickle.dumps((True, function(me, *args, **kwargs)))
            if len(members) < setup.size and groups_made() != made:
                raise RuntimeError(
                    "the function made process groups on some ranks of its pool. Torch names groups by counting them, "
                    "so later groups would have different names, and ranks would wait for each other without end: "
                    "run the function on its own pool"
                )
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)


def groups_made() -> int:
    """Return how many process groups torch has counted."""
    return int(dist.distributed_c10d._world.group_count)


def send(connection: Connection, answer: tuple[bool, object]) -> None:
    # Plain pickle, because Connection.send would pass tensors in shared memory, which is lost when this process ends.
    connection.send_bytes(pickle.dumps(answer))
