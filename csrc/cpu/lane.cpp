#include "cpu/lane.h"

#include <c10/util/Exception.h>

#include "cpu/allocator.h"
#include "cpu/deadline.h"

namespace symm_overlap::cpu {

CpuLane::CpuLane(const at::Tensor& workspace, const std::string& group_name)
    : memory_(cpu_allocator().find(workspace.storage().mutable_data(), group_name)) {
  TORCH_CHECK_VALUE(memory_, "symm_overlap: CpuLane: the workspace is not symmetric memory with a rendezvous ",
                    "in group '", group_name, "'");
}

void CpuLane::begin(int64_t timeout_ms, uint64_t call_hash, int64_t number) {
  TORCH_CHECK_VALUE(number >= 0, "symm_overlap: CpuLane.begin: the number of a call must be 0 or more, not ", number);
  timeout_ms_ = static_cast<size_t>(timeout_ms_or_default(timeout_ms));
  call_ = {call_hash, number};
  memory_->announce(call_);
}

void CpuLane::signal(int peer, int channel) {
  memory_->put_signal(peer, channel, 0);
}

void CpuLane::wait(int peer, int channel) {
  memory_->wait_signal_in(call_, peer, channel, timeout_ms_);
}

void CpuLane::barrier(int channel) {
  memory_->barrier(channel, timeout_ms_);
}

void CpuLane::give_up() {
  memory_->give_up();
}

std::string CpuLane::why_gone(int peer) const {
  return memory_->why_gone(peer);
}

}  // namespace symm_overlap::cpu
