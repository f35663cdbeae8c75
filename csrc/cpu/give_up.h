// The reason why a rank has given up, as one word that the rank stores at every peer. The word is 0 as long as the rank
// has not given up. Otherwise it is 1 + the rank where the failure began, which may be another rank. The top bit is set
// if that rank found that it and a peer are in different calls.
#pragma once

#include <cstdint>

namespace symm_overlap::cpu {

constexpr uint32_t kDifferentCall = uint32_t{1} << 31;

inline uint32_t give_up_word(int culprit) {
  return static_cast<uint32_t>(culprit) + 1;
}

inline int culprit_of(uint32_t word) {
  return static_cast<int>(word & ~kDifferentCall) - 1;
}

inline bool is_different_call(uint32_t word) {
  return (word & kDifferentCall) != 0;
}

}  // namespace symm_overlap::cpu
