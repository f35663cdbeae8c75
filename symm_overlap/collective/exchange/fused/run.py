"""One run of a plan of which a kernel is one step."""

from __future__ import annotations

from ....plan import Step, Table
from ..planned.run import Run
from .flagged import FlaggedKernel, Operands


class FusedRun(Run):
    """In front of another `Run`, which has the rest of the steps.

    Attributes:
        kernel: of the call.
    """

    scriptable = False  # steps that raise a flag, or poll one, touch no memory that plans know
    kernel: FlaggedKernel

    def multiplied(self) -> Operands:
        """What the kernel multiplies."""
        raise NotImplementedError

    def run(self) -> None:
        """See `Run.run`."""
        if self.call.settings.needs is None:
            self.kernel.require_loaded(self.multiplied(), self.outputs)  # here: in a step it would break the lane
        super().run()

    def note(self) -> None:
        """See `Run.note`."""
        super().note()
        self.kernel.note(self.multiplied(), self.outputs)

    def watched(self, table: Table) -> Table:
        """See `Run.watched`."""
        return self.kernel.watched(table)

    def _issue(self, parity: int) -> None:
        self.kernel.begin()
        super()._issue(parity)
        self.kernel.finish(self.outputs)

    def _tiles(self, step: Step) -> None:
        self.kernel.launch(self.multiplied())
