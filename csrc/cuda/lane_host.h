// The host's side of a lane: checks the arguments, launches on the current stream, and reads the failure record.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "common/pending_gates.h"
#include "cuda/kernels.h"
#include "cuda/lane.h"

namespace symm_overlap::cuda {

// Keeps its own control block and the table of peers alive, but not the peers' blocks: that is for whoever mapped them.
// A captured graph holds the addresses of all of these, so they must outlive it.
class LaneHost {
 public:
  // Size of a control block, in 32-bit words.
  static int64_t control_words(int world, int channels);

  // `control`: this rank's block, zeroed before any rank could reach it. `peers`: int64, in device memory, one address
  // a rank. `in_memory`: streams wait by memory operations where there are any; somebody must then call `hand_over`.
  LaneHost(const at::Tensor& control, const at::Tensor& peers, int rank, int world, int channels, bool in_memory);

  // Before the first launch of a call. `op` and `call` go into the record if one of the call's waits fails. With its
  // signals, the call tells the peers `call_hash` and `number`, which goes up by one with each call that runs, and its
  // waits fail when a peer has told others. A captured call, which may be replayed at any time, has the hash 0.
  void begin(int64_t op, int64_t call, int64_t timeout_ns, uint64_t call_hash, int64_t number);

  // One launch for up to kMaxPeers peers. Each is named once; no peers, no launch.
  void signal(const std::vector<int>& peers, int channel);
  // A kernel that polls holds a multiprocessor, so the stream first waits without one, by a stream memory operation, at
  // the gates that the signals open. It knows neither deadlines nor failures: a wait that takes long, or whose peer has
  // died, is handed over to the kernel behind it. Where there are no such operations, or none are wanted, while a graph
  // is captured, and where the deadline is short, the kernel waits from the beginning.
  void wait(const std::vector<int>& peers, int channel);
  // Whether a stream may have been waiting at a gate for so long, and the opening of these gates.
  bool overdue(double seconds);
  void hand_over(double seconds);
  void barrier(int channel);
  void sleep(int64_t cycles);
  // `ends`: this is the last that is launched for a call, which will run once.
  void poison(const std::vector<at::Tensor>& outputs, bool ends);
  void give_up();
  void mark_dead(int peer);

  int device() const { return device_; }

  // A read of host memory; no CUDA call. What is not there yet is not seen: synchronise first to be sure.
  std::optional<FailureRecord> failure() const;

 private:
  std::vector<PendingGates::Gate> overdue_gates(double seconds);
  void wait_at_gates(const Peers& peers, int channel, cudaStream_t stream);
  void check_peers(const std::vector<int>& peers) const;
  void check_channel(int channel) const;

  at::Tensor control_;
  at::Tensor peers_;
  std::unique_ptr<FailureRecord, void (*)(FailureRecord*)> record_;
  Lane lane_;
  Call call_;
  PendingGates gates_;
  bool has_gates_ = false;  // there are stream memory operations
  bool gated_ = false;      // of this call: signals open gates
  int device_;
};

}  // namespace symm_overlap::cuda
