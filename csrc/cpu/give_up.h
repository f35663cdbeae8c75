// Why a rank has given up, as one word that it leaves with every peer: 0 while it has not, else 1 + the rank where the
// failure began, which may be another one. The top bit says that this rank found itself and a peer in different calls.
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
