"""All the small programs. Each imported file adds its own programs to CASES."""

from tests.inductor import (
    batch_cases,
    bias_cases,
    bucket_cases,
    cast_cases,
    kept_cases,
    order_cases,
    scaled_cases,
    skipped_cases,
    stride_cases,
    sum_cases,
    written_cases,
)
from tests.inductor.cases import CASES

__all__ = [
    "CASES",
    "batch_cases",
    "bias_cases",
    "bucket_cases",
    "cast_cases",
    "kept_cases",
    "order_cases",
    "scaled_cases",
    "skipped_cases",
    "stride_cases",
    "sum_cases",
    "written_cases",
]
