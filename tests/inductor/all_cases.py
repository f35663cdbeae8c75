"""All the small programs: each of the files adds its own."""

from tests.inductor import scaled_cases, skipped_cases
from tests.inductor.cases import CASES

__all__ = ["CASES", "scaled_cases", "skipped_cases"]
