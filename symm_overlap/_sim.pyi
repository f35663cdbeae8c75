"""Types of the simulators in C++; see csrc/sim/module.cpp. The module needs no torch.

Array arguments are buffers of 64-bit integers or doubles. Results are bytes with the same kinds of numbers.
"""

from typing import Any

_Schedule = tuple[memoryview, memoryview, memoryview, memoryview, int, int]

def encode(
    rows: tuple[tuple[Any, ...], ...], placement: tuple[int, ...], microbatches: int, numbers: dict[str, int], /
) -> tuple[bytes, bytes, bytes]: ...
def add_send_recv(encoded: _Schedule, /) -> tuple[bytes, bytes] | None: ...
def unit_time(encoded: _Schedule, /) -> tuple[bytes, int, bool]: ...
def pipeline_work(
    encoded: _Schedule,
    durations: tuple[memoryview[float], memoryview[float]],
    overlap: float,
    one_receive_stream: bool,
    /,
) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]: ...
def run(work: tuple[memoryview[Any], ...], /) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """See symm_overlap/plan/work.py."""
