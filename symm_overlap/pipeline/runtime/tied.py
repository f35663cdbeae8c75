"""Parameters that several stages share, such as an embedding and the head that uses its weights.

Each stage has a copy. The copies start with equal values, and each gets the sum of the gradients of all copies, so
equal optimizers keep them equal. Stages of one rank may share the parameter itself, and autograd then sums its
gradients. Between ranks, each rank sends what the step has added to its copy's gradient to all the others. All ranks
then sum in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...plan import Step
from ..action import SEND_B
from ..schedule import Schedule
from ._torch import accumulation_hooks
from .c10d_transport import C10dTransport, exchanged_with
from .message import described
from .stage import Stage
from .ties import Copies, numbered, ties_of_rank

_CHANNELS_FROM = 1 << 10  # the channels below are for messages between stages
_FROZEN = 2  # how many tensors a rank sends in place of its gradient if its copies are frozen


class TiedParameters:
    """The tied parameters of a pipeline, as far as this rank has copies of them.

    Attributes:
        named: the argument ``tied`` as lists, to be compared between ranks.
        equalise: this rank's messages that make the copies equal, once, in the form of a plan's steps.
        reduce: this rank's messages that sum the gradients of the copies in each step, in the same form.

    Args:
        schedule: the schedule of the pipeline.
        stages: the stages of this rank.
        tied: for each parameter, (stage, name) of its copies. Lists that share a copy are one list.
        rank: this rank.

    Raises:
        ValueError: there is no such stage or parameter, copies on this rank differ in shape, or a parameter of this
            rank has two names that are in different lists.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        tied: Sequence[Copies],
        rank: int,
    ) -> None:
        self.rank = rank
        self._copies_of = numbered(schedule, stages, tied)
        self._find = partial(ties_of_rank, schedule, stages, self._copies_of, rank)
        self._ties = self._find()
        self._equal = False
        self.named = [[[stage, name] for stage, name in copies] for copies in tied]
        self.equalise = list(self._steps(from_owner=True))
        self.reduce = list(self._steps())

    def _steps(self, *, from_owner: bool = False) -> Iterator[Step]:
        """Yield the sends and the receives of this rank, by peer; with ``from_owner``, only messages from owners."""
        ties = [(peer, index, tie) for index, tie in self._ties.items() for peer in tie.ranks]
        for peer, index, tie in sorted(ties, key=lambda each: each[:2]):
            for kind in exchanged_with(peer, self.rank):
                if not from_owner or tie.owner == (self.rank if kind == SEND_B else peer):
                    yield Step(
                        kind, "compute", peers=(peer,), channel=_CHANNELS_FROM + index, label=f"tied parameter {index}"
                    )

    def make_equal(self, transport: C10dTransport | None) -> None:
        """Give every copy the value of the lowest stage's copy, before the first step.

        The transport may be None if there is only one rank.
        """
        if self._equal:
            return
        self._ties = self._find()  # whoever has given a module memory, or sharded it, may have replaced its parameters
        received = []
        for step in self.equalise:
            assert transport is not None
            if step.kind == SEND_B:
                value = _local(self._copies(step)[0].detach())
                transport.send(step, described([value]), [value])
            else:
                received.append((step, transport.receive(step)[1][0]))
        self.equalise, self._equal = [], True  # even if an error follows, the messages have been exchanged
        for step, value in received:
            copy = self._copies(step)[0]
            _require_shape(step, copy, value)
            _local(copy.detach()).copy_(value)
        for tie in self._ties.values():
            for copy in tie.mine[1:]:
                copy.detach().copy_(tie.mine[0].detach())

    @contextmanager
    def summing(
        self, transport: C10dTransport | None, backward: bool, confirm: Callable[[], object] | None = None
    ) -> Iterator[None]:
        """Return a context in which the step runs. At its end, the gradients that the step has added are summed.
        Then the copies' hooks for accumulated gradients are called.

        Gradients of earlier steps, which are sums already, are put aside while the step runs. After an error, they are
        restored.

        Args:
            transport: carries the gradients. It may be None if there is only one rank.
            backward: True if the step computes gradients.
            confirm: called at the end. If it raises, that is an error of the step too.
        """
        if backward:
            self._ties = self._find()  # parameters may have been replaced since the last step
        copies = [copy for tie in self._ties.values() for copy in tie.mine] if backward else []
        before = [copy.grad for copy in copies]
        for copy in copies:
            copy.grad = None
        try:
            with _without_hooks(copies) as hooks:
                yield
                if copies:
                    self._sum(transport)
                if confirm is not None:
                    confirm()
        except BaseException:
            for copy, gradient in zip(copies, before, strict=True):
                copy.grad = gradient
            raise
        for copy, gradient in zip(copies, before, strict=True):
            if gradient is not None:
                copy.grad = gradient if copy.grad is None else gradient.add_(copy.grad)
        for copy, hook in hooks:
            if copy.grad is not None:
                hook(copy)

    def _sum(self, transport: C10dTransport | None) -> None:
        """Give every copy the sum of the gradients of all copies, or None if no copy has a gradient.

        Raises:
            ValueError: some copies of a parameter are frozen, and others are not.
        """
        sums = {index: {self.rank: _sum([_gradient(copy) for copy in tie.mine])} for index, tie in self._ties.items()}
        frozen = {index: {not copy.requires_grad for copy in tie.mine} for index, tie in self._ties.items()}
        for step in self.reduce:
            assert transport is not None
            index = _index(step)
            if step.kind == SEND_B:
                mine = [each for each in [sums[index][self.rank]] if each is not None]
                if not all(copy.requires_grad for copy in self._copies(step)):
                    mine = [_local(self._copies(step)[0].detach()).new_empty(0)] * _FROZEN
                transport.send(step, described(mine), mine)
                continue
            gradients = transport.receive(step)[1]
            frozen[index].add(len(gradients) == _FROZEN)
            if len(gradients) == _FROZEN:
                gradients = []
            for gradient in gradients:
                _require_shape(step, self._copies(step)[0], gradient)
            sums[index][step.peer] = gradients[0] if gradients else None
        for index, found in frozen.items():
            if len(found) > 1:
                names = ", ".join(f"{name} of stage {stage}" for stage, name in self._copies_of[index])
                raise ValueError(
                    f"only some of the copies of a tied parameter require a gradient ({names}): they are one "
                    "parameter, so freeze all of them or none"
                )
        for index, tie in self._ties.items():
            total = _sum([sums[index][rank] for rank in tie.ranks])
            for copy in tie.mine:
                copy.grad = None if total is None else _like(copy, total.clone())

    def counted_elsewhere(self) -> set[int]:
        """Return the ids of the copies that a norm of all parameters must leave out here, because it has counted the
        lowest stage's copy.
        """
        return {
            id(copy) for tie in self._find().values() for copy in (tie.mine[1:] if tie.owner == self.rank else tie.mine)
        }

    def _copies(self, step: Step) -> tuple[nn.Parameter, ...]:
        return self._ties[_index(step)].mine


@contextmanager
def _without_hooks(copies: Sequence[nn.Parameter]) -> Iterator[list[tuple[nn.Parameter, Callable[[Tensor], object]]]]:
    """Return a context in which autograd does not call the hooks for accumulated gradients, and these hooks.

    They may be optimizers, and need the gradient of all copies.
    """
    registries = [accumulation_hooks(copy) for copy in copies]
    kept = [dict(registry) for registry in registries]
    try:
        for registry in registries:
            registry.clear()
        yield [(copy, hook) for copy, hooks in zip(copies, kept, strict=True) for hook in hooks.values()]
    finally:
        for registry, hooks in zip(registries, kept, strict=True):
            registry.update(hooks)


def _index(step: Step) -> int:
    assert step.channel is not None
    return step.channel - _CHANNELS_FROM


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return ``local`` as this rank's part of a tensor that is sharded like ``parameter``."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _gradient(copy: nn.Parameter) -> Tensor | None:
    gradient = copy.grad
    if gradient is None:
        return None
    if isinstance(copy, DTensor) and isinstance(gradient, DTensor) and gradient.placements != copy.placements:
        gradient = gradient.redistribute(placements=copy.placements)  # an embedding's may be whole, or a partial sum
    gradient = _local(gradient)
    return gradient.to_dense() if gradient.is_sparse else gradient  # copies on other ranks may have dense ones


def _sum(tensors: Sequence[Tensor | None]) -> Tensor | None:
    total = None
    for tensor in tensors:
        if tensor is not None:
            total = tensor if total is None else total + tensor
    return total


def _require_shape(step: Step, copy: Tensor, value: Tensor) -> None:
    if _local(copy.detach()).shape != value.shape:
        raise ValueError(
            f"{step.label} has shape {tuple(_local(copy.detach()).shape)} here and {tuple(value.shape)} on rank "
            f"{step.peer}: tied parameters must have equal shapes"
        )
