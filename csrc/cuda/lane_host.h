// The host's side of a lane: checks the arguments, launches on the current stream, and reads the failure record.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/host_lane.h"
#include "cuda/kernels.h"
#include "cuda/lane.h"
#include "cuda/pinned_blocks.h"
#include "issue/written.h"

namespace symm_overlap::cuda {

// Keeps its own control block and the table of peers alive, but not the peers' blocks: that is for whoever mapped them.
// A captured graph holds the addresses of all of these, so they must outlive it.
class LaneHost {
 public:
  // Size of a control block, in 32-bit words.
  static int64_t control_words(int world, int channels);

  // `control`: this rank's block, zeroed before any rank could reach it. `peers`: int64, in device memory, one address
  // a rank. `group_name`: where it is known what the processes of the peers are; empty: they are not looked after.
  // `hosts`: this rank's host block (control_block.h), a CPU tensor of the same size that has had its rendezvous in the
  // group; or those of all ranks, if they are in this process: pinned tensors. Calls that are not captured then signal
  // and wait by memory operations, on every rank. Empty: kernels do.
  LaneHost(const at::Tensor& control, const at::Tensor& peers, int rank, int world, int channels,
           const std::string& group_name, const std::vector<at::Tensor>& hosts);
  LaneHost(const LaneHost&) = delete;
  LaneHost& operator=(const LaneHost&) = delete;
  ~LaneHost();

  // Before the first launch of a call. `op` and `call` go into the record if one of the call's waits fails. With its
  // signals, the call tells the peers `call_hash` and `number`, which goes up by one with each call that runs, and its
  // waits fail when a peer has told others. A captured call, which may be replayed at any time, has the hash 0.
  // `by_kernels`: its signals and waits are kernels in any case, on every rank.
  void begin(int64_t op, int64_t call, int64_t timeout_ns, uint64_t call_hash, int64_t number, bool by_kernels);

  // One launch for up to kMaxPeers peers, or one call of the driver for as many memory operations as it takes (see
  // `enqueue`). Each peer is named once; no peers, no launch.
  void signal(const std::vector<int>& peers, int channel);
  void wait(const std::vector<int>& peers, int channel);
  void barrier(int channel);
  // Before a call uses the workspace, as peers may still be in a call that their hosts do not see: one of a replay. The
  // first call of a graph meets the peers; those behind it in the same graph need not. A call that is not captured
  // meets them if there was a replay since the last such call. Whether this is the first call of a graph.
  bool keep_apart_from_replays(int channel);
  void sleep(int64_t cycles);
  // Of calls that signal by kernels; see kernels.h. Without `told` the launch ends the call. `from`: by rank, the
  // address of what it shares; that of this rank is not read.
  void meet_and_sum(int channel, const std::vector<at::Tensor>& partials, bool average, const at::Tensor& out,
                    const at::Tensor& copy, std::optional<int> told);
  void await_and_gather(int channel, const std::vector<int64_t>& from, int64_t part_bytes, const at::Tensor& out);
  // `ends`: this is the last that is launched for a call, which will run once. Launches nothing where one of the two
  // above has ended the call and has written all of its outputs.
  void poison(const std::vector<at::Tensor>& outputs, bool ends);
  // On a stream on which nothing waits.
  void give_up();

  int device() const { return device_; }

  // A read of host memory; no CUDA call. What is not there yet is not seen: synchronise first to be sure.
  std::optional<FailureRecord> failure() const;

 private:
  void check_memory(const at::Tensor& control, const at::Tensor& peers, const std::vector<at::Tensor>& hosts) const;
  void check_peers(const std::vector<int>& peers) const;
  void check_channel(int channel) const;
  // The number of a launch that ends this call; 0 where it may be replayed.
  uint32_t next_end();

  at::Tensor control_;
  at::Tensor peers_;
  int device_;
  ControlBlock block_;
  std::unique_ptr<FailureRecord, void (*)(FailureRecord*)> record_;
  std::unique_ptr<PinnedBlocks> pinned_;
  std::shared_ptr<HostLane> host_;
  Lane lane_;
  Call call_;
  bool in_memory_ = false;               // this call signals and waits by memory operations, in the host blocks
  Ranks awaited_;                        // in this call, by memory operations
  bool captured_ = false;                // this call, and may be replayed
  unsigned long long capture_ = 0;       // that the last captured call belongs to; 0: there was none
  uint32_t ends_ = 0;                    // launches that end calls
  bool open_ = false;                    // the call has not been given such a launch, or may be replayed
  std::optional<issue::Written> ended_;  // what the launch that has ended this call has written
  bool flush_ = false;
};

}  // namespace symm_overlap::cuda
