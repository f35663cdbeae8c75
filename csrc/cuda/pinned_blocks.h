// The host blocks (common/control_block.h) of a lane, pinned so that this rank's GPU can address them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/control_block.h"
#include "cpu/symmetric_memory.h"

namespace symm_overlap::cuda {

// Returns why this process may not pin shared memory for a GPU; empty if it may. One page is tried. A lane may need
// more.
std::string pinning_refused(int device);

class PinnedBlocks {
 public:
  // One block, zeroed, for this rank only.
  PinnedBlocks(const ControlBlock& block, int rank);
  // The blocks of all ranks, in memory that has had its rendezvous. The memory is kept as long as this object.
  explicit PinnedBlocks(c10::intrusive_ptr<cpu::CpuSymmetricMemory> shared);
  // The blocks of all ranks, if all are in this process: pinned tensors. They are kept as long as this object.
  explicit PinnedBlocks(std::vector<at::Tensor> pinned);
  PinnedBlocks(const PinnedBlocks&) = delete;
  PinnedBlocks& operator=(const PinnedBlocks&) = delete;
  ~PinnedBlocks();

  bool of_all_ranks() const { return shared() || !pinned_.empty(); }
  // Whether the blocks are in memory shared by processes, and not in memory allocated by CUDA.
  bool shared() const { return shared_ != nullptr; }
  // By rank, the addresses of the blocks for this process and for the current GPU. If there is only this rank's block,
  // the addresses of the others are null.
  const std::vector<uint32_t*>& on_host() const { return on_host_; }
  const std::vector<uint32_t*>& on_device() const { return on_device_; }

 private:
  void unpin() noexcept;

  c10::intrusive_ptr<cpu::CpuSymmetricMemory> shared_;
  std::vector<at::Tensor> pinned_;
  std::vector<uint32_t*> on_host_;
  std::vector<uint32_t*> on_device_;
};

}  // namespace symm_overlap::cuda
