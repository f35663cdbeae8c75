"""What the choice of a path depends on, for ranks that compute on GPUs. No GPU has confirmed these estimates."""

from ..backend import Traits

TRAITS = Traits(
    device="cuda",
    in_place=False,
    streams=2,
    copy_stream=True,
    library_collectives=True,
    fewest_rows=256,
    # About 35 us at 700 TFLOP/s: in less time, launches and signals cost more than there is to hide.
    fewest_flop=2.5e10,
    # About 50 us at 369 GB/s, what copy engines reach over NVLink.
    fewest_bytes=16 << 20,
    rows_for_two_chunks=1024,
    # An estimate: a few microseconds of reading over NVLink, as long as ranks need to meet once more.
    most_bytes_in_one_shot=1 << 20,
    # Their addresses are the argument of one kernel (kMaxPartials in csrc/cuda).
    most_ranks_in_a_sum=256,
)
