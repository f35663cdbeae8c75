// The layout of a rank's control object, which its peers write and the rank reads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/call_slot.h"
#include "cpu/epoch_slot.h"

namespace symm_overlap::cpu {

// [torch signal pad | signal slots | barrier slots | give-up slots | call slots]. Signal and barrier slots are indexed
// [source rank][channel], give-up and call slots [source rank].
struct ControlLayout {
  int world_size;
  size_t pad_bytes;

  // As many channels as torch's pad of 32-bit words has for this world size.
  int channels() const { return static_cast<int>(pad_bytes / sizeof(uint32_t)) / world_size; }
  size_t bytes() const;
  EpochSlot* signal_slot(void* control, int source, int channel) const;
  EpochSlot* barrier_slot(void* control, int source, int channel) const;
  // The reason why `source` has given up; see give_up.h.
  EpochSlot* give_up_slot(void* control, int source) const;
  CallSlot* call_slot(void* control, int source) const;

 private:
  // Each slot has its own cache line, for every size of the pad that the user may set.
  size_t slots_at() const { return (pad_bytes + sizeof(EpochSlot) - 1) / sizeof(EpochSlot) * sizeof(EpochSlot); }
};

}  // namespace symm_overlap::cpu
