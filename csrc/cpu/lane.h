// One sequence of calls between the ranks of a group, over the workspace that they share. It has the signals of the
// calls, and the announcements by which ranks notice that they are in different calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "cpu/call_slot.h"
#include "cpu/symmetric_memory.h"

namespace symm_overlap::cpu {

class CpuLane {
 public:
  // `workspace`: a symmetric tensor that has had its rendezvous in this group.
  CpuLane(const at::Tensor& workspace, const std::string& group_name);

  // To be called before the first step of a call, in the caller's thread. Steps may run in other threads. `timeout_ms`
  // applies to each wait of the call; 0 means the setting of the calling thread. `number` is one higher in each call.
  void begin(int64_t timeout_ms, uint64_t call_hash, int64_t number);
  void signal(int peer, int channel);
  // Throws DistBackendError if the deadline has passed, if the peer is gone, or if it is in another call than this
  // rank.
  void wait(int peer, int channel);

  // A barrier of all ranks. Throws the same errors as `wait`. Barriers have their own channels.
  void barrier(int channel);

  // See CpuSymmetricMemory.
  void give_up();
  std::string why_gone(int peer) const;

 private:
  c10::intrusive_ptr<CpuSymmetricMemory> memory_;
  Call call_;
  size_t timeout_ms_ = 0;
};

}  // namespace symm_overlap::cpu
