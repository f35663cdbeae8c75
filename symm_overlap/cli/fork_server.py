"""The fork server of a command's ranks. It imports the modules that the ranks run once, for all of them.

This is the fork server of Python's ``multiprocessing``. A process therefore has at most one, and the server ends when
the process and its ranks have ended.
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

from symm_overlap.cli.signals import signals_blocked

OUTPUTS = (1, 2)

ProcessContext: TypeAlias = "tuple[Sequence[Connection], Mapping[str, str]]"
"""The standard output and standard error of a process, and its environment."""

COMPILER = ["torch._dynamo"] if torch.version.cuda is None else []
"""Modules that the first step of an optimizer imports. They are not preloaded if torch has CUDA: the import may query
the GPUs, and CUDA does not work in a process that is forked after that."""


def start(modules: Sequence[str]) -> None:
    """Start the fork server and return when it has imported ``modules``.

    If the server is already running, it keeps the modules it was started with. A signal that ends this process may
    interrupt the wait. The server then ends by itself once its imports are done.
    """
    multiprocessing.set_forkserver_preload([*modules, *COMPILER])
    with signals_blocked():  # the server inherits this, so it prints no traceback if Ctrl-C arrives while it imports
        multiprocessing.forkserver.ensure_running()
    first = multiprocessing.get_context("forkserver").Process(target=_nothing)  # it starts once the imports are done
    first.start()
    first.join()


def _nothing() -> None:
    pass


@contextmanager
def process_context() -> Iterator[ProcessContext]:
    """Yield this process's current outputs and environment, to send to a process that is started in the body.

    The outputs and the environment that the server would pass on may be out of date.
    """
    outputs = [Connection(os.dup(number), readable=False) for number in OUTPUTS]  # multiprocessing can send Connections
    try:
        yield outputs, dict(os.environ)
    finally:
        for output in outputs:
            output.close()


def adopt_context(there: ProcessContext) -> None:
    """Make this process use the outputs and the environment that its starter has sent in ``there``."""
    outputs, environment = there
    for number, output in zip(OUTPUTS, outputs, strict=True):
        os.dup2(output.fileno(), number)
        output.close()
    os.environ.clear()
    os.environ.update(environment)


def end_with_parent() -> None:
    """Let the kernel kill this process when the process that requested it ends.

    This works however that process ends, and even if this process hangs. The requesting process holds the other end of
    a pipe, and the kernel is configured to send SIGKILL here when that end is closed. A signal on the death of the
    parent process would not work: the parent is the fork server, which lives as long as it has children.
    """
    asked = multiprocessing.parent_process()
    assert asked is not None
    pipe = asked.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not asked.is_alive():  # it ended before the signal was configured
        os._exit(1)
