"""What the choice of a path depends on, for ranks that compute on GPUs. No GPU has confirmed these estimates."""

from ..backend import Traits
from .costs import COSTS

TRAITS = Traits(
    device="cuda",
    in_place=False,
    announces=False,
    streams=2,
    copy_stream=True,
    library_collectives=True,
    costs=COSTS,
    # For ranks that cannot reach each other's memory.
    fewest_rows=256,
    # An estimate: a few microseconds of reading over NVLink, as long as ranks need to meet once more.
    most_bytes_in_one_shot=1 << 20,
    # An estimate: to copy 48 MB takes as long as one launch of the library more, and a lane keeps twice as much.
    most_bytes_in_one_launch=32 << 20,
    # Their addresses are the argument of one kernel (kMaxPartials in csrc/cuda).
    most_ranks_in_a_sum=256,
    kernels=True,
    divides_by_result_scale=False,  # it is what cuBLAS scales its output by
)
