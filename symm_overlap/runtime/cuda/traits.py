"""The traits of GPUs, on which the choice of a path depends. Estimates that no GPU has confirmed."""

from ..backend import Traits
from .costs import COSTS

TRAITS = Traits(
    device="cuda",
    in_place=False,
    announces_offset=False,
    streams=2,
    copy_stream=True,
    library_collectives=True,
    costs=COSTS,
    # For ranks that cannot reach each other's memory.
    fewest_rows=256,
    # An estimate: reading this much over NVLink takes a few microseconds, about as long as one more meeting of the
    # ranks.
    most_bytes_in_one_shot=1 << 20,
    # An estimate: copying 48 MB takes as long as one more launch of the library. The limit is lower because a lane
    # keeps twice the bytes.
    most_bytes_in_one_launch=32 << 20,
    # The addresses of the ranks' partial results are passed as one kernel argument (kMaxPartials in csrc/cuda).
    most_ranks_in_a_sum=256,
    kernels=True,
    divides_by_result_scale=False,  # cuBLAS multiplies its output by the scale
    int8_weights=False,
    float8_rows_to_try=16,  # torch returns early for no rows, before cuBLAS looks at the layouts and dtypes
)
