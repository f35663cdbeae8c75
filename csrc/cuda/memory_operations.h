// Memory operations of streams: a write to a word of memory, or a wait for the value of a word. The CUDA driver carries
// them out when the stream reaches them. They need no kernel, and so no multiprocessor.
#pragma once

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

// Enqueues operations on a stream. `blocks`: the address of every rank's host block on the current GPU. A write comes
// after all that the stream did before, at system scope, as a release does.
void enqueue(const MemoryOperations& operations, const std::vector<uint32_t*>& blocks, bool flush, cudaStream_t stream);

}  // namespace symm_overlap::cuda
