// The flags of a lane on a GPU, between a fused kernel and the copies of its call. symm_overlap/kernels/device.py says
// what a flag and the status line are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/memory_operations.h"
#include "issue/flags.h"

namespace symm_overlap::cuda {

// Raising a flag and waiting for it act on the current stream. Nothing allocates or synchronises, so all can be
// captured.
//
// If memory operations raise flags and wait for them, neither occupies a multiprocessor. The host then writes the epoch
// of a call, so it must have counted all calls. It does not see the replays of a graph, so a captured call needs flags
// of its own, whose epoch only the GPU counts and which kernels raise.
class CudaFlags final : public issue::Flags {
 public:
  // `status`: the status line, int32 in the GPU's memory, of a first call: zero, with epoch 1. `record`: pinned int32,
  // zeroed, to which the words of the status are copied when a call has failed. `in_memory`: use memory operations.
  CudaFlags(const at::Tensor& status, const at::Tensor& record, bool in_memory);

  // Sets the flags of the next calls: int32, kFlagLine words each, in a state that is down in the next call.
  void use(const at::Tensor& words);
  // A call begins. Launches nothing. `caller`: identifies the call in the record of a failure.
  void begin(int64_t caller);
  // Sets a flag, after all that the stream has been given so far; or lets the stream wait until a kernel has set it.
  void raise(int chunk);
  void await(int chunk);
  // The same. Memory operations are added to `pending`; they are for the current stream. Before anything is launched,
  // what is pending there is enqueued.
  void raise(int chunk, PendingOperations& pending);
  void await(int chunk, PendingOperations& pending);
  // For the last launch of the call, which begins the next epoch. If one of the kernel's waits has failed, it also
  // fills the outputs with 0xFF bytes and writes the record.
  UsedFlags used() const;
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
  uint32_t* record_on_device_ = nullptr;
  uint32_t caller_ = 0;
  uint32_t epoch_ = 0;  // of the latest call, as far as the host counts
};

}  // namespace symm_overlap::cuda
