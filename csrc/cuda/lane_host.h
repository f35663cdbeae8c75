// The host side of a lane. It checks the arguments, launches on the current stream, and reads the failure record.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/host_lane.h"
#include "cuda/flags.h"
#include "cuda/kernels.h"
#include "cuda/lane.h"
#include "cuda/memory_operations.h"
#include "cuda/pinned_blocks.h"
#include "issue/written.h"

namespace symm_overlap::cuda {

// Keeps this rank's control block and the table of peers alive, but not the peers' blocks: the code that mapped them
// must keep them. A captured graph holds the addresses of all of these, so they must outlive the graph.
class LaneHost {
 public:
  // Returns the size of a control block, in 32-bit words.
  static int64_t control_words(int world, int channels);

  // `control`: this rank's block, zeroed before any rank could reach it.
  // `peers`: int64, in device memory, one address for each rank.
  // `group_name`: the group in which the processes of the peers are known. If it is empty, peers that die are not
  // noticed.
  // `hosts`: this rank's host block (control_block.h), a CPU tensor of the same size that has had its rendezvous in the
  // group; or, if all ranks are in this process, pinned tensors of all of them. Calls that are not captured then signal
  // and wait by memory operations, on every rank. If it is empty, kernels signal and wait instead.
  LaneHost(const at::Tensor& control, const at::Tensor& peers, int rank, int world, int channels,
           const std::string& group_name, const std::vector<at::Tensor>& hosts);
  LaneHost(const LaneHost&) = delete;
  LaneHost& operator=(const LaneHost&) = delete;
  ~LaneHost();

  // To be called before the first launch of a call, with the caller's stream current. Returns whether the call is
  // captured. The stream waits for the end of the last call, which may have been issued on another stream: of the same
  // capture, if this call is captured, and otherwise of the last call that was not captured.
  //
  // `op` and `call` are written to the record if one of the call's waits fails. With its signals, the call announces
  // `call_hash` and `number` to the peers. `number` increases by one with each call that runs. The call's waits fail if
  // a peer has announced other values. `call_hash` is 0 if nothing is to be compared. A captured call is not compared,
  // since it may be replayed at any time. `by_kernels`: signals and waits of this call are always kernels, on every
  // rank.
  bool begin(int64_t op, int64_t call, int64_t timeout_ns, uint64_t call_hash, int64_t number, bool by_kernels);

  // One launch for up to kMaxPeers peers, or memory operations of the current stream. These are added to `pending`;
  // they are for the same stream. A signal to many peers is always a kernel. Before anything is launched, what is
  // pending there is enqueued. Each peer is named once. Without peers, nothing is launched.
  void signal(const std::vector<int>& peers, int channel, PendingOperations& pending);
  void wait(const std::vector<int>& peers, int channel, PendingOperations& pending);
  void barrier(int channel);
  // To be called before a call uses the workspace, because peers may still be in a call of a replay, which their hosts
  // do not see. The first call of a graph meets the peers in a barrier. Later calls of the same graph do not need it. A
  // call that is not captured meets the peers if there was a replay since the last such call. Returns whether this is
  // the first call of a graph.
  bool barrier_around_replays(int channel);
  void sleep(int64_t cycles);
  // For calls that signal by kernels; see kernels.h. Without `done_channel`, the launch ends the call. `from`: by rank,
  // the address of the data that it shares. This rank's address is not read.
  void meet_and_sum(int channel, const std::vector<at::Tensor>& partials, bool average, const at::Tensor& out,
                    const at::Tensor& copy, std::optional<int> done_channel);
  void await_and_gather(int channel, const std::vector<int64_t>& from, int64_t part_bytes, const at::Tensor& out);
  // To be called after the last launch of a call, with the caller's stream current. If a wait has failed, the outputs
  // are filled with 0xFF bytes. Launches nothing if one of the two functions above has ended the call and has written
  // all of its outputs. `flags`: those that the call has used, or null; they end with the call. Returns whether the
  // call runs, and is not only captured.
  bool end(const std::vector<at::Tensor>& outputs, const CudaFlags* flags);
  // Ends every wait of the lane, on every rank, because of an error in a call of `op`. To be called with a current
  // stream on which nothing waits.
  void give_up(int64_t op, int64_t call);

  int device() const { return device_; }

  // Reads host memory, without a CUDA call. A failure that the GPU has not written yet is not visible. Synchronise the
  // device first to be sure.
  std::optional<FailureRecord> failure() const;

 private:
  void check_memory(const at::Tensor& control, const at::Tensor& peers, const std::vector<at::Tensor>& hosts) const;
  void check_peers(const std::vector<int>& peers) const;
  void check_channel(int channel) const;
  void poison(const std::vector<at::Tensor>& outputs, const CudaFlags* flags);
  // Returns the number of a launch that ends this call; 0 if the call may be replayed.
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
  Ranks awaited_;                        // ranks that this call waits for by memory operations
  bool captured_ = false;                // this call is captured, and may be replayed
  unsigned long long capture_ = 0;       // the capture that the last captured call belongs to; 0: there was none
  uint32_t ends_ = 0;                    // the number of launches that end calls so far
  bool open_ = false;                    // no such launch was made for this call yet, or it may be replayed
  std::optional<issue::Written> ended_;  // the memory written by the launch that has ended this call
  struct Done {                          // the end of a call
    c10::Event event{c10::DeviceType::CUDA};
    std::optional<c10::cuda::CUDAStream> on;
    unsigned long long capture = 0;  // the capture that the call belongs to
  };
  Done done_;           // of the last call that was not captured
  Done captured_done_;  // of the last one that was
  bool flush_ = false;
};

}  // namespace symm_overlap::cuda
