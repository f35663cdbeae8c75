"""Rank processes for tests: a pool that is started once and then runs module-level functions of the test files.

::

    def gathers_in_rank_order(me: Rank, n: int) -> list[int]:
        out = [torch.empty(n) for _ in range(me.world)]
        dist.all_gather(out, torch.full((n,), float(me.rank)), group=me.group)
        return [int(t[0]) for t in out]

    @pytest.mark.parametrize("world", [1, 2, 3])
    def test_gathers_in_rank_order(ranks: Pool, world: int) -> None:
        assert ranks.run(world, gathers_in_rank_order, 4) == [list(range(world))] * world

The processes are forked from a server that has imported torch and its compiler (tests/preloaded.py), so a pool starts
in about a second. They form one gloo group, and further groups that are created at the start. If a rank fails, dies or
exceeds the deadline, the pool ends, because its group is then out of step. The next call starts new processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from tests import rank_process
from tests.rank_process import COMPILER, Rank, Ranks, Setup

__all__ = ["Outcome", "Pool", "Rank", "RankError", "Running"]

DEFAULT_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", **COMPILER}
PRELOADED = ["tests.preloaded"]
START_SECONDS = 120.0
GRACE_SECONDS = 10.0  # time for the other ranks to end once one has failed
EXIT_SECONDS = 20.0


def forks() -> ForkServerContext:
    """Return a context that forks processes from a server that has imported torch. The first use starts the server."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    multiprocessing.forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


class RankError(AssertionError):
    """Ranks failed. The message has the traceback of every failing rank, or its stacks if it had to be killed."""

    def __init__(self, failures: Mapping[int, str], world: int) -> None:
        self.failures = dict(failures)
        super().__init__("\n".join(f"rank {rank} of {world}: {why.rstrip()}\n" for rank, why in failures.items()))


@dataclass(frozen=True)
class Outcome:
    """How a function ended on one rank."""

    value: Any = None
    failure: str | None = None
    """None if the function returned, else the traceback or the cause of the process's death."""


class Running:
    """A function that is running on some ranks of a pool."""

    def __init__(self, pool: Pool, members: Ranks) -> None:
        self._pool = pool
        self._members = members

    def outcomes(self, timeout: float = 60.0) -> list[Outcome]:
        """Wait until the function has ended on every rank. For tests in which ranks are expected to fail or die."""
        try:
            found = self._pool._collect(self._members, timeout)
        except KeyboardInterrupt:
            self._pool.kill()  # the ranks ignore Ctrl-C, and their functions may never end
            raise
        if any(outcome.failure for outcome in found):
            self._pool.kill()
        return found

    def results(self, timeout: float = 60.0) -> list[Any]:
        """Wait, and return the function's results by rank. Raise RankError if it failed on any rank."""
        found = self.outcomes(timeout)
        failures = {rank: outcome.failure for rank, outcome in enumerate(found) if outcome.failure}
        if failures:
            raise RankError(failures, len(found))
        return [outcome.value for outcome in found]


class Pool:
    """`size` rank processes in one gloo group and in `groups`. The first use starts them.

    Args:
        size: number of processes.
        groups: further groups, each a tuple of global ranks in ascending order. ``run(world, ...)`` needs the group
            ``tuple(range(world))``. The group of all ranks always exists.
        environment: variables that are set (or, with None, unset) in the processes before they call symm_overlap.
        device: "cpu" or "cuda". With "cuda", rank r uses GPU r modulo the number of GPUs.
    """

    def __init__(
        self,
        size: int,
        *,
        groups: Iterable[Ranks] = (),
        environment: Mapping[str, str | None] | None = None,
        device: str = "cpu",
    ) -> None:
        self.size = size
        self.groups = (tuple(range(size)), *groups)
        self.environment = {**DEFAULT_ENVIRONMENT, **(environment or {})}
        self.device = device
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._stacks: tempfile.TemporaryDirectory[str] | None = None
        self._store: dist.TCPStore | None = None
        self._busy: set[int] = set()

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Run ``function(Rank, *args, **kwargs)`` on ranks 0 to world-1, and return its results by rank.

        Args:
            world: number of ranks to run on.
            function: a module-level function, which the processes find by its name.
            timeout: seconds after which every rank's stacks are recorded and the pool is killed.

        Raises:
            RankError: any rank raised, died, or was still running at the deadline.
        """
        return self.submit(tuple(range(world)), function, *args, **kwargs).results(timeout)

    def submit(self, members: Ranks, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Running:
        """Start the function on the group `members`, and return at once."""
        if members not in self.groups:
            raise ValueError(f"no group of ranks {members}; this pool of {self.size} has {sorted(self.groups)}")
        if still := self._busy.intersection(members):
            self.kill()
            raise RuntimeError(
                f"ranks {sorted(still)} still run an earlier function: call its outcomes() or results() first"
            )
        job = pickle.dumps((members, function, args, kwargs))
        self._start()
        self._busy.update(members)
        for rank in members:
            self._connections[rank].send_bytes(job)
        return Running(self, members)

    def pid(self, rank: int) -> int:
        self._start()
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def kill(self) -> None:
        """Kill every process at once. The next call starts new ones."""
        for process in self._processes:
            process.kill()
        self._release()

    def close(self) -> None:
        """Let every process leave its groups and exit. Raise RankError if one does not exit, or not with code 0."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + EXIT_SECONDS
        failures = {}
        for rank, process in enumerate(self._processes):
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                failures[rank] = (
                    f"still running {EXIT_SECONDS:.0f} s after the pool was closed\n{self._stacks_of([rank])[rank]}"
                )
            elif process.exitcode != 0:
                failures[rank] = self._death(rank)
        self.kill()
        if failures:
            raise RankError(failures, self.size)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def _start(self) -> None:
        if self._processes:
            return
        spawns = "SYMM_OVERLAP_SPAWN_RANKS" in os.environ  # see CONTRIBUTING.md
        context = multiprocessing.get_context("spawn") if spawns else forks()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stacks = tempfile.TemporaryDirectory(prefix="symm_overlap_ranks_")
        setup = Setup(self.size, self.groups, self.device, self._store.port, self.environment)
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            files = self._stacks_file(rank), self._errors_file(rank)
            process = context.Process(target=rank_process.main, args=(rank, setup, theirs, *files), name=f"rank{rank}")
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(mine)
        started = self._collect(tuple(range(self.size)), START_SECONDS)
        failures = {rank: outcome.failure for rank, outcome in enumerate(started) if outcome.failure}
        if failures:
            self.kill()
            raise RankError(failures, self.size)

    def _release(self) -> None:
        for process in self._processes:
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._store = [], [], None
        self._busy.clear()
        if self._stacks is not None:
            self._stacks.cleanup()
            self._stacks = None

    def _collect(self, members: Ranks, timeout: float) -> list[Outcome]:
        """Receive one answer from every member. A failure shortens the wait, as the others may wait for that rank."""
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        reason = f"still running after {timeout:g} s"
        while missing := [rank for rank in members if rank not in outcomes]:
            waiting_for = {self._connections[rank]: rank for rank in missing}
            ready = wait(list(waiting_for), max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = self._stacks_of(missing)
                outcomes |= {
                    rank: Outcome(failure=f"{reason}; killed. Its stacks:\n{stacks[rank]}{self._stderr_of(rank)}")
                    for rank in missing
                }
                break
            for connection in ready:
                rank = waiting_for[connection]  # type: ignore[index]
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].failure and deadline > time.monotonic() + GRACE_SECONDS:
                    deadline = time.monotonic() + GRACE_SECONDS
                    reason = f"still running {GRACE_SECONDS:g} s after rank {rank} had failed"
        self._busy.difference_update(members)
        return [outcomes[rank] for rank in members]

    def _receive(self, rank: int) -> Outcome:
        try:
            returned, value = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return Outcome(failure=self._death(rank))
        return Outcome(value=value) if returned else Outcome(failure=f"{value}{self._stderr_of(rank)}")

    def _death(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(EXIT_SECONDS)
        code = process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        stacks = Path(self._stacks_file(rank)).read_text().split("\n\n")
        stacks.sort(key=lambda stack: not stack.startswith("Current thread"))  # a rank may have dozens of idle threads
        return "\n\n".join([f"process {process.pid} died: {how}{self._stderr_of(rank)}", *stacks])

    def _stacks_file(self, rank: int) -> str:
        assert self._stacks is not None
        return str(Path(self._stacks.name) / f"rank{rank}")

    def _errors_file(self, rank: int) -> str:
        return f"{self._stacks_file(rank)}.errors"

    def _stderr_of(self, rank: int) -> str:
        """Return what a rank has written to stderr in its last function, under a heading."""
        text = Path(self._errors_file(rank)).read_text(errors="replace").strip()
        return f"\nIts stderr:\n{text}" if text else ""

    def _stacks_of(self, members: Iterable[int]) -> dict[int, str]:
        """Return the Python stacks of every thread of these ranks, as written by their SIGUSR1 handlers."""
        files = {rank: Path(self._stacks_file(rank)) for rank in members}
        for rank in files:
            with contextlib.suppress(ProcessLookupError):  # it may have died just now
                os.kill(self.pid(rank), signal.SIGUSR1)
        sizes: list[int] = []
        for _ in range(40):
            before, sizes = sizes, [file.stat().st_size for file in files.values()]
            if all(sizes) and sizes == before:
                break
            time.sleep(0.05)
        return {rank: file.read_text() for rank, file in files.items()}
