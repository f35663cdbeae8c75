"""One call of an op: its group, its path, and the exchange that the path stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from .._torch import symm_mem
from ..memory import NotPreparedError, direct_access, lane_for, lane_group, naming
from . import c10d, engine
from .check import check_alike
from .engine import Chunk
from .paths import Choice, choose, forced_text


class Call:
    """A call of ``op``, once its arguments are known to be good: ``with Call(...) as call``.

    Args:
        op: the op's name in `paths.OPS`.
        tensor: an input, for device and dtype.
        m, n, k: the whole matmul of this rank, as `paths.choose` wants it; m counts gathered rows.
        rows: rows of the part that belongs to one rank: a chunk's matmul has so many.
        arguments: tells what must be the same on all ranks, for checking.
        shard: what is gathered, flat; None where nothing is.
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup,
        tensor: Tensor,
        m: int,
        n: int,
        k: int,
        rows: int,
        arguments: Callable[[], str],
        shard: Tensor | None = None,
    ) -> None:
        self.op, self.group, self.device = op, group, tensor.device
        self.rank, self.world = group.rank(), group.size()
        self.lane = lane_for(group, self.device)
        self.lane.require_in_step()
        self._symmetric = 0 if shard is None else self._rendezvous_of(shard)
        where = f" in symmetric memory of rendezvous {self._symmetric}" if self._symmetric else ""
        direct = True
        if self.world > 1:
            # First of all: what follows is collective, and a peer may have refused its arguments.
            check_alike(group, self.lane, op, lambda: f"{op}{arguments()} of {tensor.dtype}{where}{forced_text()}")
            direct = direct_access(group, self.device)
        self.choice: Choice = choose(op, m, n, k, rows, tensor.dtype, self.world, self.device.type, direct)
        # The plain collective of a sequential call: on CPU peers' memory is at hand; on GPUs a small one is the vendor
        # library's business, unless other lanes are in use, of which it knows nothing.
        self._by_plan = (
            direct
            and self.choice.path != "c10d"
            and (self.choice.path == "pipelined" or self.device.type == "cpu" or self.lane.index > 0)
        )
        if self.lane.index > 0 and not self.single and not self._by_plan and self.device.type != "cpu":
            raise ValueError(
                f"lane {self.lane.index} is in use, but {op} goes through torch.distributed ({self.choice}), whose "
                "collectives of one group cannot be in flight side by side: give each thread a process group of its own"
            )

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None or isinstance(error, NotPreparedError):  # which the peers refuse too
            return
        # The peers are in this call too: whatever ended it here, they must not wait for the rest of it.
        if not self.single and self.lane.broken is None:
            self.lane.give_up(self.op, error)

    @property
    def single(self) -> bool:
        """Whether there is nobody to communicate with."""
        return self.choice.path == "single"

    @property
    def sequential(self) -> bool:
        """Whether the matmul is to be whole, after or before the exchange."""
        return self.choice.path == "sequential"

    @property
    def in_place(self) -> bool:
        """Whether peers' shards can be read where they lie."""
        return self._by_plan and self.device.type == "cpu" and not self.single

    def all_gather(
        self,
        shard: Tensor,
        gathered: Callable[[int], Tensor] | None,
        consume: Callable[[Chunk, Tensor], object] | None,
        outputs: Sequence[Tensor],
        *,
        accumulate: bool = False,
        at_once: Callable[[list[Tensor]], object] | None = None,
    ) -> None:
        """See `engine.all_gather`; ``at_once`` only where shards can be read `in_place`."""
        if self.single:
            if consume is not None:
                consume((0, 0), shard)
            if gathered is not None:
                gathered(0).copy_(shard)
        elif self._by_plan:
            peers = self._peer_shards(shard)
            engine.all_gather(
                self.lane,
                self.choice,
                shard,
                gathered,
                consume,
                outputs,
                accumulate=accumulate,
                at_once=at_once,
                peer_shards=peers,
                op=self.op,
            )
        else:
            with self._turn() as group:
                c10d.all_gather(group, self.choice, shard, gathered, consume)

    def reduce_scatter(
        self,
        produce: Callable[[Chunk, Tensor], object] | None,
        output: Tensor,
        *,
        average: bool,
        at_once: Callable[[Tensor], object] | None = None,
    ) -> None:
        """See `engine.reduce_scatter`; ``at_once`` only where peers can read what is produced `in_place`."""
        if self._by_plan and not self.single:
            engine.reduce_scatter(self.lane, self.choice, produce, output, average=average, at_once=at_once, op=self.op)
            return
        assert produce is not None
        if self.single:
            produce((0, 0), output)
        else:
            with self._turn() as group:
                c10d.reduce_scatter(group, self.choice, produce, output, average=average)

    def all_reduce(self, produce: Callable[[Chunk, Tensor], object], output: Tensor, *, average: bool) -> None:
        """See `engine.all_reduce`."""
        if self.single:
            produce((0, 0), output)
        elif self._by_plan:
            engine.all_reduce(self.lane, self.choice, produce, output, average=average, op=self.op)
        else:
            with self._turn() as group:
                c10d.all_reduce(group, self.choice, produce, output, average=average)

    @contextmanager
    def _turn(self) -> Iterator[dist.ProcessGroup]:
        """The lane's group, for collectives of torch.distributed that belong to this call alone."""
        with self.lane.turn(self.op):
            try:
                yield lane_group(self.group, self.lane.index)
            except dist.DistBackendError as error:
                raise naming(self.op, error) from error

    def _rendezvous_of(self, shard: Tensor) -> int:
        """The rendezvous, by number, in which peers learnt to read ``shard`` where it is, or 0; alike on all ranks."""
        if self.world == 1 or self.device.type != "cpu":
            return 0
        return _C.rendezvous_number(shard, self.group.group_name)

    def _peer_shards(self, shard: Tensor) -> Callable[[int, int], Tensor] | None:
        """The shard of a rank, which begins so many elements into that rank's memory, in symmetric memory."""
        if not self._symmetric:
            return None
        handle = symm_mem.rendezvous(shard, self.group.group_name)
        return lambda rank, offset: handle.get_buffer(rank, tuple(shard.shape), shard.dtype, offset)


def describe(*tensors: Tensor | torch.Size) -> str:
    """Shapes, for the message of a check."""
    return ", ".join(str(tuple(getattr(tensor, "shape", tensor))) for tensor in tensors)
