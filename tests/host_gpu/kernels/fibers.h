// The threads of a block are fibers of one thread of the host. They take turns when they pause or reach a barrier.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

namespace host_gpu {

// Runs `body` for every thread of every block.
void run_grid(unsigned blocks, unsigned threads, const std::function<void()>& body);

// Lets the other threads of the block run.
void pause_thread(unsigned nanoseconds);

void block_barrier();

extern thread_local uint3 thread_index, block_index;
extern thread_local dim3 block_size, grid_size;

}  // namespace host_gpu
