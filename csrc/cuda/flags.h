// The flags of a lane on a GPU, between a fused kernel and the copies of its call. symm_overlap/kernels/device.py says
// what a flag and the status line are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "cuda/kernels.h"
#include "issue/flags.h"

namespace symm_overlap::cuda {

// Every function acts on the current stream, and none allocates or synchronises, so all can be captured.
//
// If memory operations raise flags and wait for them, neither occupies a multiprocessor. The host then writes the epoch
// of a call, so it must have counted all calls. It does not see the replays of a graph, so a captured call needs flags
// of its own, whose epoch only the GPU counts and which kernels raise.
class CudaFlags final : public issue::Flags {
 public:
  // `status`: the status line, zeroed, int32 in the GPU's memory. `record`: pinned int32, zeroed, to which the words of
  // the status are copied when a call has failed. `in_memory`: use memory operations.
  CudaFlags(const at::Tensor& status, const at::Tensor& record, bool in_memory);

  // Sets the flags of the next calls: int32, kFlagLine words each, in a state that is down in the next call.
  void use(const at::Tensor& words);
  // The first launch of a call: its epoch begins. `caller`: identifies the call in the record of a failure.
  void begin(int64_t caller);
  void raise(int chunk) override;
  void await(int chunk) override;
  // The last launch of a call: if one of the kernel's waits has failed, the outputs are filled with 0xFF bytes, and the
  // record is written.
  void finish(const std::vector<at::Tensor>& outputs);
  // Ends every wait for a flag, now and later. To be called with a current stream on which nothing waits.
  void give_up();

 private:
  uint32_t* flag(int chunk) const;
  uint32_t* status() const { return static_cast<uint32_t*>(status_.data_ptr()); }

  at::Tensor status_;
  at::Tensor record_;
  at::Tensor words_;
  int64_t count_ = 0;
  bool in_memory_;
  uint32_t epoch_ = 0;  // of the latest call, as far as the host counts
};

}  // namespace symm_overlap::cuda
