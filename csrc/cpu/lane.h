// One sequence of calls between the ranks of a group, over the workspace that they share: the signals of the calls, and
// the announcements by which ranks notice that they are in different calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "cpu/call_slot.h"
#include "cpu/symmetric_memory.h"

namespace symm_overlap::cpu {

class CpuLane {
 public:
  // `workspace`: a symmetric tensor whose rendezvous in this group is over.
  CpuLane(const at::Tensor& workspace, const std::string& group_name);

  // Before the first step of a call, in the caller's thread: steps may run in other threads. `timeout_ms` is for each
  // wait of the call; 0 means the calling thread's. `number` goes up by one from call to call.
  void begin(int64_t timeout_ms, uint64_t call_hash, int64_t number);
  void signal(int peer, int channel);
  // Throws DistBackendError: past the deadline, when the peer is gone, and when it is in another call than this rank.
  void wait(int peer, int channel);

  // Of all ranks; throws as `wait` does. It has channels of its own.
  void barrier(int channel);

  // See CpuSymmetricMemory.
  void give_up();
  std::string gone(int peer) const;

 private:
  c10::intrusive_ptr<CpuSymmetricMemory> memory_;
  Call call_;
  size_t timeout_ms_ = 0;
};

}  // namespace symm_overlap::cpu
