// The last kernel of a call, where no other kernel sees to its end.
#include "cuda/end_of_call.cuh"
#include "cuda/kernels.h"
#include "cuda/load.h"

namespace symm_overlap::cuda {
namespace {

constexpr int kThreads = kMostRanks;

// A thread for each rank looks what that one has announced. When nothing failed, that is a word of the host for each
// rank that was awaited, all read at once over PCIe; then two words of the GPU and one of the host follow. One block,
// so that calls are compared once, and what that finds is known wherever memory is filled.
__global__ void poison_kernel(Lane lane, Call call, Ranks awaited, Extents extents, uint32_t end) {
  const int rank = static_cast<int>(threadIdx.x);
  if (awaited.words[rank / 32] >> (rank % 32) & 1u) require_same_call(lane, lane.host, call, rank, 0);
  __syncthreads();
  end_call(lane, call, extents.items, extents.count, end);
}

}  // namespace

cudaError_t load_poison_kernel() {
  return load_kernels({reinterpret_cast<const void*>(poison_kernel)});
}

cudaError_t launch_poison(const Lane& lane, const Call& call, const Ranks& awaited, const Extents& extents,
                          uint32_t end, cudaStream_t stream) {
  poison_kernel<<<1, kThreads, 0, stream>>>(lane, call, awaited, extents, end);
  return cudaGetLastError();
}

}  // namespace symm_overlap::cuda
