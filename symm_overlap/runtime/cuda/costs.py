"""What operations cost on known GPUs.

The number of SMs, the peak rates of dense matmuls, and the bandwidths come from datasheets. Figures that others
published for the H100 are: 700 TFLOP/s in large bfloat16 matmuls; of the 450 GB/s of a link, 369 GB/s by copy engines
and 343 GB/s by copying kernels; and 0.8 us until a flag is seen. Those of the other GPUs are in proportion to their
datasheets.

This project has measured on one H200 (bench/RESULTS.md): large bfloat16 matmuls, the bandwidth of sums, waits by memory
operations, and the rates of our persistent kernels, 0.96 in gathers and 0.95 in sums. Matmuls of few rows take 6 us
there, and the time to read the weight at 0.75 of the bandwidth of the datasheet. If one stream waits between copies,
the link is idle for 5 us. A kernel starts 3 to 13 us after a copy on another stream has ended. The rate of a series of
matmuls, and the time after an event, were chosen so that plans take as long as measured there. For the other GPUs, all
this is assumed too, relative to their datasheets. All other figures are estimates.
`bench.model_error` compares the model with the times measured on the H200, and with times that others published.
"""

import torch

from ..costs import DeviceCosts, Tile

_BY_COPY_ENGINE, _BY_KERNEL = 369 / 450, 343 / 450
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

# Tiles that matmul libraries choose from, and the share of the device's rate that each reaches. Traces on an H200 show
# most of these shapes in one orientation. The shares are estimates.
_TILES = (
    *(Tile(rows, columns, 1.0) for rows, columns in ((128, 256), (256, 128))),
    *(Tile(rows, columns, 0.97) for rows, columns in ((128, 192), (192, 128), (192, 192), (128, 320), (320, 128))),
    Tile(128, 128, 0.85),
    *(Tile(rows, columns, 0.7) for rows, columns in ((128, 64), (64, 128), (96, 64), (64, 96))),
)


def _gpu(
    name: str,
    sms: int,
    *,
    half: float,
    eight_bit: float,
    single: float,
    double: float,
    memory: float,
    link: float,
    reached: float = 710 / 989,
    fused: float | None = None,
) -> DeviceCosts:
    """Return the costs of a GPU from its datasheet: TFLOP/s for each width of floats, GB/s of its memory, and GB/s of
    its links in one direction; and the share of these rates that large tiles reach, and that our persistent kernel has
    of the library's matmul, if it was measured. With the epilogues of its tiles, a bfloat16 matmul with k = 8192
    reaches 700 TFLOP/s on an H100, and 830 on an H200.
    """
    peaks = {torch.bfloat16: half, torch.float16: half, torch.float32: single, torch.float64: double}
    peaks.update(dict.fromkeys(_FLOAT8, eight_bit))
    return DeviceCosts(
        name=name,
        sms=sms,
        tiles=_TILES,
        splits=(1, 2, 3, 4, 5, 6, 8),  # estimates
        flops={dtype: reached * peak * 1e12 for dtype, peak in peaks.items()},
        memory=0.9 * memory * 1e9,
        matmul_memory=0.75 * memory * 1e9,
        epilogue=100,
        matmul_start=4e-6,
        copy=_BY_COPY_ENGINE * link * 1e9,
        copy_start=2e-6,
        kernel=2e-6,
        signal=2e-6,  # by a kernel
        wait=2e-6,  # by a kernel
        stream_wait=2.6e-6,
        flag=0.8e-6,
        event=4e-6,
        turn=2e-6,
        host=1e-6,  # issued from C++
        host_matmul=1e-5,  # torch.mm takes 14 to 16 us from Python on the H200's machine
        library=_BY_KERNEL * link * 1e9,
        library_start=15e-6,
        held=1,  # by a kernel that polls
        pieces=0.94,
        fused=fused or 0.95,  # a goal where it was not measured
        fused_measured=fused is not None,
    )


COSTS = (
    _gpu("H100", 132, half=989, eight_bit=1979, single=67, double=67, memory=3350, link=450),
    _gpu(
        "H200",
        132,
        half=989,
        eight_bit=1979,
        single=67,
        double=67,
        memory=4800,
        link=450,
        reached=840 / 989,
        fused=0.95,
    ),
    _gpu("A100", 108, half=312, eight_bit=312, single=19.5, double=19.5, memory=2039, link=300),
    _gpu("B200", 148, half=2250, eight_bit=4500, single=75, double=37, memory=8000, link=900),
)
"""The first record is also used for GPUs that have no record."""
