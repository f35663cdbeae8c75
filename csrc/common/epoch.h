// The signal protocol that host and device share.
//
// A signal is a 32-bit epoch in memory that both sides can reach. For each (source rank, channel) there is one slot;
// its only writer is the source, which stores 1, 2, 3, ... with release order at system scope. The reader keeps count
// of the epochs it has consumed and waits, with acquire order, until the slot has reached the next one. A slot is never
// reset, so there is no window in which a second signal is lost or a late reset erases one, and a signal may run ahead
// of its wait.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define SYMM_OVERLAP_HOST_DEVICE __host__ __device__
#else
#define SYMM_OVERLAP_HOST_DEVICE
#endif

namespace symm_overlap {

// True once `found` is at or past `expected`; right across the wrap at 2^32 as long as they are less than 2^31 apart.
SYMM_OVERLAP_HOST_DEVICE inline bool epoch_reached(uint32_t found, uint32_t expected) {
  return static_cast<int32_t>(found - expected) >= 0;
}

}  // namespace symm_overlap
