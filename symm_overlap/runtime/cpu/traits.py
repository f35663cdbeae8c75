"""The traits of CPUs, on which the choice of a path depends.

The thresholds come from ``python -m bench.collective_matmul``.
"""

from ..backend import Traits

TRAITS = Traits(
    device="cpu",
    in_place=True,
    announces_offset=True,
    streams=1,
    copy_stream=False,
    library_collectives=False,
    costs=(),
    # With fewer rows, a part's matmul is limited by reading the weight, which every part would read again.
    fewest_rows=256,
    # python -m bench.one_shot: on two ranks, one shot is quicker up to 2 MiB. With more ranks, each rank sums more data
    # that could be divided among them.
    most_bytes_in_one_shot=1 << 18,
    most_bytes_in_one_launch=0,  # no library would be quicker
    most_ranks_in_a_sum=None,
    kernels=False,
    divides_by_result_scale=True,  # torch 2.11, 2.13, 2.14 and 2.15
    int8_weights=True,  # aten._weight_int8pack_mm
    float8_rows_to_try=0,  # torch checks everything ahead of the rows, which can take long
)
