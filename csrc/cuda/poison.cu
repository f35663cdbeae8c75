// The last kernel of a call: if any wait failed, nobody may mistake what was computed after it for a result.
#include "cuda/kernels.h"
#include "cuda/load.h"
#include "cuda/signal.cuh"

namespace symm_overlap::cuda {
namespace {

constexpr int kThreads = kMostRanks;
constexpr int kBlocks =
    64;  // when nothing failed, the kernel reads two words and is gone: few blocks start and end soonest

// A thread for each rank looks what that one has announced.
__global__ void poison_kernel(Lane lane, Call call, Ranks awaited, Extents extents, bool ends) {
  __shared__ bool failed;
  const int rank = static_cast<int>(threadIdx.x);
  if (ends && blockIdx.x == 0 && rank == 0) store_release_system(&lane.record->ended, call.number);
  if (awaited.words[rank / 32] >> (rank % 32) & 1u) require_same_call(lane, call, rank, 0);
  __syncthreads();
  if (rank == 0) failed = call_failed(lane, call);
  __syncthreads();
  if (!failed) return;
  const size_t first = blockIdx.x * static_cast<size_t>(kThreads) + threadIdx.x;
  for (int e = 0; e < extents.count; ++e) {
    unsigned char* data = static_cast<unsigned char*>(extents.items[e].data);
    for (size_t i = first; i < extents.items[e].bytes; i += static_cast<size_t>(kBlocks) * kThreads) data[i] = 0xFF;
  }
}

}  // namespace

cudaError_t load_poison_kernel() {
  return load_kernels({reinterpret_cast<const void*>(poison_kernel)});
}

cudaError_t launch_poison(const Lane& lane, const Call& call, const Ranks& awaited, const Extents& extents, bool ends,
                          cudaStream_t stream) {
  poison_kernel<<<kBlocks, kThreads, 0, stream>>>(lane, call, awaited, extents, ends);
  return cudaGetLastError();
}

}  // namespace symm_overlap::cuda
