// What a rank on a GPU says about the call it is in, as one 64-bit word: its number in the upper half, and its hash in
// the lower one. One word, because a reader must never see the number of one call with the hash of another.
#pragma once

#include <cstdint>

#include "common/epoch.h"

namespace symm_overlap {

using Announcement = uint64_t;
constexpr Announcement kNoAnnouncement = 0;

// `hash` is of everything that must be the same on every rank; 0: announce and compare nothing. Two different calls of
// one number look the same with a probability of 1 to 2^32.
inline Announcement announcement(uint64_t hash, uint32_t number) {
  if (hash == 0) return kNoAnnouncement;
  const uint32_t folded = static_cast<uint32_t>(hash ^ (hash >> 32));
  return static_cast<Announcement>(number) << 32 | (folded != 0 ? folded : 1);  // never kNoAnnouncement
}

SYMM_OVERLAP_HOST_DEVICE inline uint32_t number_of(Announcement announced) {
  return static_cast<uint32_t>(announced >> 32);
}

// Calls with even and with odd numbers have a place each: a rank cannot begin call n+2 before every peer has finished
// call n.
SYMM_OVERLAP_HOST_DEVICE inline int place_of(Announcement announced) {
  return static_cast<int>(number_of(announced) & 1);
}

}  // namespace symm_overlap
