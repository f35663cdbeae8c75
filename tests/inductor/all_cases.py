"""All the small programs. Each imported file adds its own programs to CASES."""

from tests.inductor import bucket_cases, cast_cases, kept_cases, scaled_cases, skipped_cases, stride_cases, sum_cases
from tests.inductor.cases import CASES

__all__ = [
    "CASES",
    "bucket_cases",
    "cast_cases",
    "kept_cases",
    "scaled_cases",
    "skipped_cases",
    "stride_cases",
    "sum_cases",
]
