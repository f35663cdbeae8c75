// The host blocks (common/control_block.h) of a lane, pinned so that this rank's GPU can address them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/control_block.h"
#include "cpu/symmetric_memory.h"

namespace symm_overlap::cuda {

// Why this process may not pin shared memory for a GPU; empty where it may. A page is tried, and a lane may need more.
std::string pinning_refused(int device);

class PinnedBlocks {
 public:
  // A block for this rank alone, zeroed.
  PinnedBlocks(const ControlBlock& block, int rank);
  // Those of all ranks: memory that has had its rendezvous. It lives as long as this does.
  explicit PinnedBlocks(c10::intrusive_ptr<cpu::CpuSymmetricMemory> shared);
  // Those of all ranks, which are in this process: pinned tensors. They live as long as this does.
  explicit PinnedBlocks(std::vector<at::Tensor> pinned);
  PinnedBlocks(const PinnedBlocks&) = delete;
  PinnedBlocks& operator=(const PinnedBlocks&) = delete;
  ~PinnedBlocks();

  bool of_all_ranks() const { return shared() || !pinned_.empty(); }
  // Whether they lie in memory that processes share, and not in what CUDA has allocated.
  bool shared() const { return shared_ != nullptr; }
  // By rank, as this process and as the current GPU addresses them; null for the others where there is only the own.
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
