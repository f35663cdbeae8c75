// Memory operations of streams: what the CUDA driver does with a word of memory when a stream gets there, without a
// kernel, and so without a multiprocessor.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "common/host_lane.h"

namespace symm_overlap::cuda {

// Whether driver and device have them, and streams enough queues: tried on memory of its own. Never while a graph is
// captured.
bool has_memory_operations(int device);

// Whether waits can be followed by a flush of what peers have written to this GPU. Where they cannot, it is the fence
// ahead of the peer's own write alone that makes visible what was written before.
bool can_flush(int device);

// `blocks`: the host block of every rank, as the current GPU addresses it. A write comes after all that the stream did
// before, at system scope, as a release does.
void enqueue(const MemoryOperations& operations, const std::vector<uint32_t*>& blocks, bool flush, cudaStream_t stream);

}  // namespace symm_overlap::cuda
