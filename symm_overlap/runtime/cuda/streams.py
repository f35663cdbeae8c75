"""Plans on CUDA streams: the caller's stream, a lane's side streams, and an event wherever one stream waits for
another.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from contextlib import suppress
from functools import cache

import torch

from ... import _C
from ...plan import Program, Table
from ...plan.execute import at_step

# The streams whose work goes ahead of the work of other streams. Copies go ahead, because some matmul waits for each of
# them, and a copy engine takes no multiprocessor away from a matmul.
_HIGH_PRIORITY = frozenset({"copy", "copy1"})


@cache
def stream_ahead(device: torch.device) -> torch.cuda.Stream:
    """Return a stream on which nothing ever waits. All lanes share it, because streams share a few hardware queues. It
    is none of torch's streams, which several owners share.
    """
    return torch.cuda.ExternalStream(_C.new_cuda_stream(device.index, True), device)


class CudaStreams:
    """Runs plans on CUDA streams, without ever blocking the host; see `symm_overlap.plan.execute`.

    The first stream of a plan is the stream that is current when the plan is run. The other streams are created on
    first use and kept. Every plan forks from the caller's stream and joins it again, so to the caller a call is like
    one kernel on that stream. Hence:

    - Nothing needs ``record_stream``. Side streams use two kinds of memory. The caller's (inputs, outputs) stays
      allocated until the join is enqueued, and is safe to reuse in stream order after the join. The lane's workspace is
      never freed.
    - A call can be captured in a CUDA graph. The capture follows the events into the side streams and back.

    Steps are enqueued in the plan's order. In this order a single stream could run them all without deadlock. This
    matters because streams are less independent than they look: when a kernel runs for the first time, CUDA may wait
    for all running work before it loads the code; and if there are more streams than hardware queues (8, or
    CUDA_DEVICE_MAX_CONNECTIONS), streams share queues.

    One instance serves one lane. Two ops in flight need two instances. If they shared streams, and two ranks issued the
    ops in different orders, each rank would have a wait enqueued ahead of the signal that the other rank waits for.

    Args:
        device: the GPU, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}
        # Indexed by the program's numbers and shared by all programs: waiting for an event means waiting for its latest
        # record so far.
        self._events: list[torch.cuda.Event] = []
        self._one_at_a_time = threading.Lock()

    def run(self, program: Program, table: Table) -> None:
        """Enqueue every step on its stream, in the plan's order. That stream is current while the step's function runs.

        Raises:
            Whatever a step's function raises, with the step's text added. Work enqueued so far is joined to the
                caller's stream. The lane is then out of step with the other ranks, and their waits will time out.
        """
        with self._one_at_a_time, torch.cuda.device(self._device):
            caller = torch.cuda.current_stream()
            while len(self._events) < program.events:
                self._events.append(torch.cuda.Event())
            names = list(program.streams)
            streams = {names[0]: caller, **self.side_streams(names[1:])}
            used: dict[str, torch.cuda.Stream] = {}
            try:
                self._issue(program, table, streams, used)
            except BaseException:
                for stream in used.values():
                    if stream is not caller:
                        with suppress(RuntimeError):  # CUDA or the capture has failed too: there is nothing to join
                            caller.wait_stream(stream)
                raise
            finally:
                torch.cuda.set_stream(caller)

    def _issue(
        self,
        program: Program,
        table: Table,
        streams: dict[str, torch.cuda.Stream],
        used: dict[str, torch.cuda.Stream],
    ) -> None:
        """Enqueue the steps, and record in ``used`` every stream that has work."""
        get, events, set_stream = table.get, self._events, torch.cuda.set_stream
        current = None
        for item in program.items:
            name = item.step.stream
            stream = streams[name]
            if stream is not current:
                set_stream(stream)
                current = used[name] = stream
            for event in item.waits:
                stream.wait_event(events[event])
            function = get(item.kind)
            if function is not None:
                try:
                    function(item.step)
                except BaseException as error:
                    raise at_step(error, item)  # noqa: B904 (the same exception)
            if item.event is not None:
                events[item.event].record(stream)

    def side_streams(self, names: Collection[str]) -> dict[str, torch.cuda.Stream]:
        """Return streams of this lane by name. Missing ones are created."""
        for name in names:
            if name not in self._streams:
                number = _C.new_cuda_stream(self._device.index, name in _HIGH_PRIORITY)
                self._streams[name] = torch.cuda.ExternalStream(number, self._device)
        return {name: self._streams[name] for name in names}
