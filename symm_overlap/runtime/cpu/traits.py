"""What the choice of a path depends on, for ranks that compute on CPUs.

The thresholds come from ``python -m bench.collective_matmul``.
"""

from ..backend import Traits

TRAITS = Traits(
    device="cpu",
    in_place=True,
    announces=True,
    streams=1,
    copy_stream=False,
    library_collectives=False,
    costs=(),
    # Under so many rows a part's matmul is bound by reading the weight, which every part would read again.
    fewest_rows=256,
    # python -m bench.one_shot: on two ranks one shot is quicker up to 2 MiB. With more ranks each of them reads more of
    # what it could share out.
    most_bytes_in_one_shot=1 << 18,
    most_bytes_in_one_launch=0,  # there is no library that would be quicker
    most_ranks_in_a_sum=None,
    kernels=False,
    divides_by_result_scale=True,  # torch 2.11 and 2.13
)
