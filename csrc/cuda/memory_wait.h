// Waits of a stream for words of memory, which no kernel makes: stream memory operations of the CUDA driver.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace symm_overlap::cuda {

// A word of this GPU's memory, and the epoch that it must have reached (epoch_reached of common/epoch.h).
struct AwaitedWord {
  uint32_t* word;
  uint32_t epoch;
};

// Whether driver and device can do it; tried on a word that is 0. Never while a graph is captured.
bool can_wait_in_memory(uint32_t* zero, cudaStream_t stream);

// What follows on the stream starts once all words have reached their epochs. One call of the driver.
void wait_in_memory(const std::vector<AwaitedWord>& words, cudaStream_t stream);

}  // namespace symm_overlap::cuda
