"""All the small programs: each of the files adds its own."""

from tests.inductor import bucket_cases, kept_cases, scaled_cases, skipped_cases
from tests.inductor.cases import CASES

__all__ = ["CASES", "bucket_cases", "kept_cases", "scaled_cases", "skipped_cases"]
