"""Memory of torch's caching allocator that outlives the call which allocates it.

A program may send what it allocates to a pool: inside ``torch.cuda.use_mem_pool``, and in the warm-up of
``torch.compile(mode="reduce-overhead")``, whose graph trees do the same. The trees then own all memory of the pool.
They raise an error if something is still allocated there that they do not know of, and replays would overwrite it. But
the first call of a lane may be in such a warm-up, and what it allocates for the lane is there to stay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

_T = TypeVar("_T")


def lasting(make: Callable[[], _T], device: torch.device) -> _T:
    """Return what ``make`` returns. What it allocates on a GPU belongs to no pool that the caller may be using.

    It must not be called while a CUDA graph is being captured.

    torch cannot leave a pool without its number, which it does not tell. However, a pool receives only what the thread
    allocates that uses it. So ``make`` runs on a thread of its own, while the caller waits. It has the device and the
    stream of the caller, and work that it enqueues is ordered as if the caller had enqueued it.
    """
    if device.type != "cuda":
        return make()
    made, stream = Future[_T](), torch.cuda.current_stream(device)
    # A daemon: a process that is interrupted while its peers do not come can still end.
    threading.Thread(target=_run, args=(made, make, device, stream), name="symm_overlap memory", daemon=True).start()
    try:
        return made.result()
    finally:
        del made  # it has the error, whose traceback has this frame: neither would be freed before the next collection


def _run(made: Future[_T], make: Callable[[], _T], device: torch.device, stream: torch.cuda.Stream) -> None:
    try:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            made.set_result(make())
    except BaseException as error:
        made.set_exception(error)
    finally:
        del made  # as above
