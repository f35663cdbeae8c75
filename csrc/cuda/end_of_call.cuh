// The end of a call. If any wait failed, this makes sure that data computed after it is not mistaken for a result.
#pragma once

#include "cuda/kernels.h"
#include "cuda/signal.cuh"

namespace symm_overlap::cuda {

// The end of a call for the flags that it has used. Returns whether one of its waits for a flag has failed.
__device__ inline bool end_flags(const UsedFlags& flags) {
  const uint32_t failure = load_relaxed_system(flags.status);
  flags.status[kFlagEpoch] += flags.ended;
  if (failure != 0 && flags.record[0] == 0) {
    for (int word = 1; word < kStatusWords; ++word) flags.record[word] = flags.status[word];
    flags.record[kFlagCaller] = flags.caller;
    store_release_system(flags.record, failure);  // the host reads this word first
  }
  return failure != 0;
}

// To be called by all threads of one block, the last block of the call to run. One block fills memory more slowly than
// many blocks would, but this only happens when there is no result.
// `end`: the number of this launch among the launches that end calls, for the host to see; or 0.
__device__ inline void end_call(const Lane& lane, const Call& call, const Extent* extents, int count, uint32_t end,
                                const UsedFlags& flags = {}) {
  __shared__ bool failed;
  if (threadIdx.x == 0) {
    failed = call_failed(lane, call);
    if (flags.status != nullptr && end_flags(flags)) failed = true;
    if (end != 0) store_release_system(&lane.record->ended, end);  // now the host may free memory that was read
  }
  __syncthreads();
  if (!failed) return;
  for (int e = 0; e < count; ++e) {
    unsigned char* data = static_cast<unsigned char*>(extents[e].data);
    for (size_t i = threadIdx.x; i < extents[e].bytes; i += blockDim.x) data[i] = 0xFF;
  }
}

}  // namespace symm_overlap::cuda
