// Memory operations of streams: a write to a word of memory, or a wait for the value of a word. The CUDA driver carries
// them out when the stream reaches them. They need no kernel, and so no multiprocessor.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "common/host_lane.h"

namespace symm_overlap::cuda {

// Returns whether the driver and the device have memory operations, and streams have enough queues. The operations are
// tried on newly allocated memory. Must not be called while a graph is captured.
bool has_memory_operations(int device);

// Returns whether waits can be followed by a flush of what peers have written to this GPU. If they cannot, only the
// fence ahead of the peer's own write makes visible what was written before.
bool can_flush(int device);

// Operations of one stream that the driver has not been given yet. A call of the driver takes the host about as long as
// a launch, however many operations it is for, so operations that follow one another are given to it together.
class PendingOperations {
 public:
  // `blocks`: by rank, the address on the current GPU of the words that operations name, such as a host block. A write
  // comes after all that the stream did before, at system scope, as a release does.
  void add(const MemoryOperations& operations, const std::vector<uint32_t*>& blocks, bool flush);
  // Gives them to the driver. Throws if the driver rejects them. None is pending then, either.
  void enqueue(cudaStream_t stream);
  // Forgets them.
  void clear() noexcept { operations_.clear(); }

 private:
  std::vector<CUstreamBatchMemOpParams> operations_;
};

}  // namespace symm_overlap::cuda
