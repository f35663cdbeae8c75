// What a rank on a GPU announces about its current call: one 64-bit word with the number of the call in the upper half
// and its hash in the lower half. It is one word because a reader must never see the number of one call with the hash
// of another.
#pragma once

#include <cstdint>

#include "common/epoch.h"

namespace symm_overlap {

using Announcement = uint64_t;
constexpr Announcement kNoAnnouncement = 0;

// `hash` is a hash of everything that must be the same on every rank. If it is 0, nothing is announced or compared.
// Two different calls with the same number look the same with a probability of 1 to 2^32.
inline Announcement announcement(uint64_t hash, uint32_t number) {
  if (hash == 0) return kNoAnnouncement;
  const uint32_t folded = static_cast<uint32_t>(hash ^ (hash >> 32));
  return static_cast<Announcement>(number) << 32 | (folded != 0 ? folded : 1);  // never kNoAnnouncement
}

SYMM_OVERLAP_HOST_DEVICE inline uint32_t number_of(Announcement announced) {
  return static_cast<uint32_t>(announced >> 32);
}

// There is one place for calls with even numbers and one for calls with odd numbers. Two are enough, because a rank
// cannot begin call n+2 before every peer has finished call n.
SYMM_OVERLAP_HOST_DEVICE inline int place_of(Announcement announced) {
  return static_cast<int>(number_of(announced) & 1);
}

}  // namespace symm_overlap
