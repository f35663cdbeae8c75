// What is said on CPU and on CUDA alike when two ranks find themselves in different calls.
#pragma once

#include <cstdint>
#include <string>

namespace symm_overlap {

inline const char* same_calls_advice() {
  return "All ranks of a group must make the same calls, with the same shapes, dtypes and settings, in the same order. "
         "Set SYMM_OVERLAP_CHECK=1 on every rank to see both calls in full.";
}

// `peer` as the message names it, and the numbers of both calls; `theirs` is -1 when that rank has announced no call.
inline std::string different_call(const std::string& peer, int64_t theirs, int64_t ours) {
  const std::string number = std::to_string(ours);
  std::string what = "it is in its call number " + std::to_string(theirs) + ", this rank in its call number " + number;
  if (theirs == ours) {
    what = "both are call number " + number + " of their rank, but op, shapes, dtypes or settings differ";
  } else if (theirs < 0) {
    what = "it has announced none, and this rank is in its call number " + number;
  }
  return peer + " is in a different call: " + what + ". " + same_calls_advice();
}

}  // namespace symm_overlap
