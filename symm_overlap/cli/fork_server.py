"""The server from which the ranks of a command are forked: it imports what they run once, for all of them.

It is that of Python's ``multiprocessing``, so a process has one, and it ends when the process and its ranks have ended.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import multiprocessing.forkserver
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TypeAlias

import torch

from symm_overlap.cli.signals import held

OUTPUTS = (1, 2)

Surroundings: TypeAlias = "tuple[Sequence[Connection], Mapping[str, str]]"
"""Where a process writes, and its environment."""

COMPILER = ["torch._dynamo"] if torch.version.cuda is None else []
"""What the first step of an optimizer imports. It may ask for GPUs, and CUDA does not survive a fork after that."""


def start(modules: Sequence[str]) -> None:
    """Return when the server runs and has imported ``modules``; it keeps those that it began with.

    A signal that ends this process may interrupt the wait. The server then ends by itself once it has imported.
    """
    multiprocessing.set_forkserver_preload([*modules, *COMPILER])
    with held():  # with the signals blocked, it prints no traceback for a Ctrl-C that comes while it imports
        multiprocessing.forkserver.ensure_running()
    first = multiprocessing.get_context("forkserver").Process(target=_nothing)  # it answers once it has imported
    first.start()
    first.join()


def _nothing() -> None:
    pass


@contextmanager
def surroundings() -> Iterator[Surroundings]:
    """What to send to a process that starts in the body: what the server has may be older."""
    outputs = [Connection(os.dup(number), readable=False) for number in OUTPUTS]  # the kind of file that can be sent
    try:
        yield outputs, dict(os.environ)
    finally:
        for output in outputs:
            output.close()


def enter(there: Surroundings) -> None:
    """In a process that has been sent this: write where the sender does, and have its environment."""
    outputs, environment = there
    for number, output in zip(OUTPUTS, outputs, strict=True):
        os.dup2(output.fileno(), number)
        output.close()
    os.environ.clear()
    os.environ.update(environment)


def end_with_parent() -> None:
    """Let the kernel kill this process when the one that asked for it ends, however that happens, whatever hangs here.

    That process holds the other end of a pipe, and the kernel is asked to signal its end-of-file with SIGKILL. (Death
    of the parent process would not do: that is the server, which lives as long as it has children.)
    """
    asked = multiprocessing.parent_process()
    assert asked is not None
    pipe = asked.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not asked.is_alive():  # it ended before the kernel was asked
        os._exit(1)
