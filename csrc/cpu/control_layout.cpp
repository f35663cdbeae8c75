#include "cpu/control_layout.h"

namespace symm_overlap::cpu {

static_assert(sizeof(CallSlot) == sizeof(EpochSlot), "bytes() and call_slot() count lines of one size");

size_t ControlLayout::bytes() const {
  return slots_at() + sizeof(EpochSlot) * world_size * (2 * channels() + 2);
}

EpochSlot* ControlLayout::signal_slot(void* control, int source, int channel) const {
  return reinterpret_cast<EpochSlot*>(static_cast<char*>(control) + slots_at()) + source * channels() + channel;
}

EpochSlot* ControlLayout::barrier_slot(void* control, int source, int channel) const {
  return signal_slot(control, source, channel) + world_size * channels();
}

EpochSlot* ControlLayout::give_up_slot(void* control, int source) const {
  return barrier_slot(control, world_size, 0) + source;
}

CallSlot* ControlLayout::call_slot(void* control, int source) const {
  return reinterpret_cast<CallSlot*>(give_up_slot(control, world_size)) + source;
}

}  // namespace symm_overlap::cpu
