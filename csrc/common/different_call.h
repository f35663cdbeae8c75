// The error message, for CPU and CUDA, when two ranks are in different calls.
#pragma once

#include <cstdint>
#include <string>

namespace symm_overlap {

inline const char* same_calls_advice() {
  return "All ranks of a group must make the same calls, with the same shapes, dtypes and settings, in the same order. "
         "Set SYMM_OVERLAP_CHECK=1 on every rank to see both calls in full.";
}

// `peer` is the name of the peer in the message. `theirs` and `ours` are how many calls each rank had made on the lane
// before. `theirs` is -1 if the peer has not announced a call. The message counts from 1.
inline std::string different_call(const std::string& peer, int64_t theirs, int64_t ours) {
  const std::string number = std::to_string(ours + 1);
  std::string what =
      "it is in its call number " + std::to_string(theirs + 1) + ", this rank in its call number " + number;
  if (theirs == ours) {
    what = "both are call number " + number +
           " of their rank, but op, shapes, dtypes or settings differ, or a call of one rank alone was rejected";
  } else if (theirs < 0) {
    what = "it has not announced a call, and this rank is in its call number " + number;
  }
  return peer + " is in a different call: " + what + ". " + same_calls_advice();
}

}  // namespace symm_overlap
