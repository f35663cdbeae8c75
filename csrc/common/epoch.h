// The signal protocol that host and device share.
//
// A signal is a 32-bit epoch in memory that both sides can access. For each (source rank, channel) there is one slot.
// Only the source writes it: it stores 1, 2, 3, ... with release order at system scope. The reader counts the epochs
// that it has consumed and waits, with acquire order, until the slot has reached the next one. A slot is never reset.
// So there is no window in which a second signal is lost or a late reset erases a signal, and a signal may run ahead of
// its wait.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define SYMM_OVERLAP_HOST_DEVICE __host__ __device__
#else
#define SYMM_OVERLAP_HOST_DEVICE
#endif

namespace symm_overlap {

// True if `found` is at or past `expected`. Correct across the wrap at 2^32 if both are less than 2^31 apart.
SYMM_OVERLAP_HOST_DEVICE inline bool epoch_reached(uint32_t found, uint32_t expected) {
  return static_cast<int32_t>(found - expected) >= 0;
}

}  // namespace symm_overlap
