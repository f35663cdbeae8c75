"""Find out what is hidden and what is still exposed: read the traces of profilers.

While torch's profiler records, every call of an op and every step of its plan is a range in the trace. The same holds
under `torch.autograd.profiler.emit_nvtx`, which passes ranges on to Nsight Systems. `record` profiles a block of a
program. `read` reads a trace, and `report` prints where the time went. See docs/profile.md.
"""

from .compare import Comparison, compare
from .exposure import Calls, Exposure, exposure, exposure_of_call, kinds_of_calls
from .page import page
from .read import read
from .record import Recorded, record
from .recording import Activity, RecordedCall, Recording
from .report import report

__all__ = [
    "Activity",
    "Calls",
    "Comparison",
    "Exposure",
    "Recorded",
    "RecordedCall",
    "Recording",
    "compare",
    "exposure",
    "exposure_of_call",
    "kinds_of_calls",
    "page",
    "read",
    "record",
    "report",
]
