"""A lane whose ranks are all in this process, each with its own stream, for any world size on one GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from symm_overlap import _C

LINE = 32  # words; see csrc/common/control_block.h


class Lanes:
    """``lanes[rank]`` is a ``_C.CudaLane``, and ``on(rank)`` makes that rank's stream current. It needs no rendezvous.

    Args:
        timeout: seconds that each wait may last. The default is long, so that no test depends on the speed of the GPU,
            but shorter than the time limit of a test.
        in_memory: whether streams signal and wait by memory operations instead of kernels.
    """

    def __init__(self, world: int, channels: int = 4, timeout: float = 30.0, in_memory: bool = False) -> None:
        self.world, self.channels = world, channels
        self.device = torch.device("cuda", torch.cuda.current_device())
        words = _C.CudaLane.control_words(world, channels)
        self.blocks = [torch.zeros(words, dtype=torch.int32, device=self.device) for _ in range(world)]
        peers = torch.tensor([block.data_ptr() for block in self.blocks], dtype=torch.int64, device=self.device)
        self.hosts = [torch.zeros(words, dtype=torch.int32, pin_memory=True) for _ in range(world if in_memory else 0)]
        self.lanes = [
            _C.CudaLane(block, peers, rank, world, channels, "", self.hosts) for rank, block in enumerate(self.blocks)
        ]
        streams = [_C.new_cuda_stream(self.device.index, False) for _ in range(world)]
        self.streams = [torch.cuda.ExternalStream(stream, self.device) for stream in streams]
        for lane in self.lanes:
            lane.begin(0, 1, round(timeout * 1e9))
        self._warm_up()
        torch.cuda.synchronize()

    def _warm_up(self) -> None:
        """Run the kernels that tests launch behind a wait.

        The first launch of a kernel may wait for everything that runs on the GPU. Behind a wait, that would deadlock.
        """
        for dtype in (torch.float32, torch.int32, torch.uint8):
            a, b = torch.zeros(64, dtype=dtype, device=self.device), torch.empty(64, dtype=dtype, device=self.device)
            a.fill_(1).add_(1)
            b.copy_(a)

    def __getitem__(self, rank: int) -> "_C.CudaLane":
        return self.lanes[rank]

    @contextmanager
    def on(self, rank: int) -> Iterator["_C.CudaLane"]:
        with torch.cuda.stream(self.streams[rank]):
            yield self.lanes[rank]

    def advance(self, epochs: int) -> None:
        """Make every counter and slot look as if that many signals had been sent and awaited."""
        for block in self.blocks:
            notice = self.world * self.channels * LINE
            block[:notice].fill_(epochs)  # the slots, and unused words between them
            behind = notice + (3 + self.world) * LINE  # skips `notice`, `failed`, `call` and `ticket`
            block[behind:].fill_(epochs)  # the counters
        torch.cuda.synchronize()

    def check(self) -> None:
        """Wait for the device, and assert that no wait has failed."""
        torch.cuda.synchronize()
        failures = {rank: lane.failure() for rank, lane in enumerate(self.lanes) if lane.failure() is not None}
        assert not failures, {
            rank: f"peer {f.peer}, channel {f.channel}: expected {f.expected}, found {f.found}"
            f"{', after a peer failed' if f.peer_failed else ''}"
            for rank, f in failures.items()
        }
