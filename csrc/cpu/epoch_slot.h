// One epoch in shared memory, and how a rank waits for it: spin briefly, then sleep in the kernel.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "common/epoch.h"

namespace symm_overlap::cpu {

// A cache line of its own, so that waiting for one slot does not slow the writer of another.
struct alignas(64) EpochSlot {
  std::atomic<uint32_t> epoch;
  std::atomic<uint32_t> sleepers;

  // Only the slot's one source rank calls this.
  void signal(uint32_t value);

  // Whether the signal is there, without what its sender did before it: to look often, and then call `reached` once.
  bool seen(uint32_t expected) const { return epoch_reached(epoch.load(std::memory_order_relaxed), expected); }
  // The same, and then what the sender did before the signal is visible.
  bool reached(uint32_t expected) const { return epoch_reached(epoch.load(std::memory_order_acquire), expected); }

  // A few microseconds of spinning. True when `expected` was reached.
  bool spin(uint32_t expected) const;

  // Sleeps until `expected` is reached. `idle` runs at least once in `slice_ms` of sleep (from 1 to 999) and ends the
  // wait by throwing.
  void sleep(uint32_t expected, int64_t slice_ms, const std::function<void()>& idle);
};
static_assert(sizeof(EpochSlot) == 64 && std::atomic<uint32_t>::is_always_lock_free);

}  // namespace symm_overlap::cpu
