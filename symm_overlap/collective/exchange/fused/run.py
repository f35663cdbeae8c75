"""One run of a plan in which one step is a fused kernel."""

from __future__ import annotations

from torch import Tensor

from .... import _C
from ....plan import Step, Table
from ..planned.run import Run
from .flagged import FlaggedKernel, Operands


class FusedRun(Run):
    """A mixin in front of another `Run`, which runs the rest of the steps.

    Attributes:
        kernel: the kernel of the call.
    """

    kernel: FlaggedKernel

    @property
    def scriptable(self) -> bool:
        """See `Run.scriptable`."""
        return self.kernel.flags.native is not None

    def multiplied(self) -> Operands:
        """Return the operands of the kernel."""
        raise NotImplementedError

    def run(self) -> None:
        """See `Run.run`."""
        if self.call.settings.needs is None and self.kernel.captured:
            self.kernel.require_loaded(self.multiplied())  # here: an error in a step would break the lane
        super().run()

    def note(self) -> None:
        """See `Run.note`."""
        super().note()
        self.kernel.note(self.multiplied())

    def watched(self, table: Table) -> Table:
        """See `Run.watched`."""
        return self.kernel.watched(table)

    def _issue(self, parity: int) -> _C.Flags | None:
        self.turn = self.kernel.turn
        return self.turn.run(lambda memory: self._issue_with(memory, parity))

    def _issue_with(self, memory: tuple[Tensor, ...], parity: int) -> None:
        operands = self.operands
        if self.scriptable:
            self.operands = (*operands, *memory)
        super()._issue(parity)
        self.given = self.given[: len(self.tensors) + len(operands)]

    def _tiles(self, step: Step) -> None:
        self.kernel.launch(self.multiplied())
