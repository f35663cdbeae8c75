// The last kernel of a call: if any wait failed, nobody may mistake what was computed after it for a result.
#include "cuda/kernels.h"
#include "cuda/load.h"
#include "cuda/signal.cuh"

namespace symm_overlap::cuda {
namespace {

constexpr int kThreads = kMostRanks;

// A thread for each rank looks what that one has announced. When nothing failed, that is a word of the host for each
// rank that was awaited, all read at once over PCIe; then two words of the GPU and one of the host follow. One block,
// so that calls are compared once, and what that finds is known wherever memory is filled. To fill takes it longer than
// it would take many, which only happens when there is no result.
__global__ void poison_kernel(Lane lane, Call call, Ranks awaited, Extents extents, bool ends) {
  __shared__ bool failed;
  const int rank = static_cast<int>(threadIdx.x);
  if (awaited.words[rank / 32] >> (rank % 32) & 1u) require_same_call(lane, lane.host, call, rank, 0);
  __syncthreads();
  if (rank == 0) {
    failed = call_failed(lane, call);
    if (ends) store_release_system(&lane.record->ended, call.number);  // from here on, the host may free what was read
  }
  __syncthreads();
  if (!failed) return;
  for (int e = 0; e < extents.count; ++e) {
    unsigned char* data = static_cast<unsigned char*>(extents.items[e].data);
    for (size_t i = threadIdx.x; i < extents.items[e].bytes; i += kThreads) data[i] = 0xFF;
  }
}

}  // namespace

cudaError_t load_poison_kernel() {
  return load_kernels({reinterpret_cast<const void*>(poison_kernel)});
}

cudaError_t launch_poison(const Lane& lane, const Call& call, const Ranks& awaited, const Extents& extents, bool ends,
                          cudaStream_t stream) {
  poison_kernel<<<1, kThreads, 0, stream>>>(lane, call, awaited, extents, ends);
  return cudaGetLastError();
}

}  // namespace symm_overlap::cuda
