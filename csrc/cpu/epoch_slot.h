// One epoch in shared memory, and the wait for it: the rank spins briefly and then sleeps in the kernel.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "common/epoch.h"

namespace symm_overlap::cpu {

// Each slot has its own cache line, so that a wait for one slot does not slow down the writer of another slot.
struct alignas(64) EpochSlot {
  std::atomic<uint32_t> epoch;
  std::atomic<uint32_t> sleepers;

  // Only the source rank of the slot may call this.
  void signal(uint32_t value);

  // Whether the signal has arrived. Does not make visible what the sender did before the signal: use it to check often,
  // and then call `reached` once.
  bool seen(uint32_t expected) const { return epoch_reached(epoch.load(std::memory_order_relaxed), expected); }
  // The same, but if the signal has arrived, everything that the sender did before the signal is visible.
  bool reached(uint32_t expected) const { return epoch_reached(epoch.load(std::memory_order_acquire), expected); }

  // Spins for a few microseconds. Returns true if `expected` was reached.
  bool spin(uint32_t expected) const;

  // Sleeps until `expected` is reached. `idle` runs at least once in `slice_ms` of sleep (from 1 to 999). It can end
  // the wait by throwing.
  void sleep(uint32_t expected, int64_t slice_ms, const std::function<void()>& idle);
};
static_assert(sizeof(EpochSlot) == 64 && std::atomic<uint32_t>::is_always_lock_free);

}  // namespace symm_overlap::cpu
