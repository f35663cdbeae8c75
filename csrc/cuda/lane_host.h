// The host's side of a lane: checks the arguments, launches on the current stream, and reads the failure record.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/lane.h"

namespace symm_overlap::cuda {

// Keeps its own control block and the table of peers alive, but not the peers' blocks: that is for whoever mapped them.
// A captured graph holds the addresses of all of these, so they must outlive it.
class LaneHost {
 public:
  // Size of a control block, in 32-bit words.
  static int64_t control_words(int world, int channels);

  // `control`: this rank's block, zeroed before any rank could reach it. `peers`: int64, in device memory, one address
  // a rank.
  LaneHost(const at::Tensor& control, const at::Tensor& peers, int rank, int world, int channels);

  // Before the first launch of a call. `op` and `call` go into the record if one of the call's waits fails. With its
  // signals, the call tells the peers `call_hash` and `number`, which goes up by one with each call that runs, and its
  // waits fail when a peer has told others. A captured call, which may be replayed at any time, has the hash 0.
  void begin(int64_t op, int64_t call, int64_t timeout_ns, uint64_t call_hash, int64_t number);

  // One launch for up to kMaxPeers peers. Each is named once; no peers, no launch.
  void signal(const std::vector<int>& peers, int channel);
  void wait(const std::vector<int>& peers, int channel);
  void barrier(int channel);
  void sleep(int64_t cycles);
  void poison(const std::vector<at::Tensor>& outputs);
  void give_up();
  void mark_dead(int peer);

  int device() const { return device_; }

  int device() const { return device_; }

  // A read of host memory; no CUDA call. What is not there yet is not seen: synchronise first to be sure.
  std::optional<FailureRecord> failure() const;

 private:
  void check_peers(const std::vector<int>& peers) const;
  void check_channel(int channel) const;

  at::Tensor control_;
  at::Tensor peers_;
  std::unique_ptr<FailureRecord, void (*)(FailureRecord*)> record_;
  Lane lane_;
  Call call_;
  int device_;
};

}  // namespace symm_overlap::cuda
