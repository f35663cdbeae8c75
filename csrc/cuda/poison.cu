// The last kernel of a call, for calls that no other kernel ends.
#include "cuda/end_of_call.cuh"
#include "cuda/kernels.h"
#include "cuda/load.h"

namespace symm_overlap::cuda {
namespace {

constexpr int kThreads = kMostRanks;

// One thread for each rank reads what that rank has announced. If nothing failed, this is one word of host memory for
// each awaited rank, all read at once over PCIe. Then two words of GPU memory and one of host memory are read. There is
// only one block, so that calls are compared once, and all threads that fill memory know the result.
__global__ void poison_kernel(Lane lane, Call call, Ranks awaited, Extents extents, UsedFlags flags, uint32_t end) {
  const int rank = static_cast<int>(threadIdx.x);
  if (awaited.words[rank / 32] >> (rank % 32) & 1u) require_same_call(lane, lane.host, call, rank, 0);
  __syncthreads();
  end_call(lane, call, extents.items, extents.count, end, flags);
}

}  // namespace

cudaError_t load_poison_kernel() {
  return load_kernels({reinterpret_cast<const void*>(poison_kernel)});
}

cudaError_t launch_poison(const Lane& lane, const Call& call, const Ranks& awaited, const Extents& extents,
                          const UsedFlags& flags, uint32_t end, cudaStream_t stream) {
  poison_kernel<<<1, kThreads, 0, stream>>>(lane, call, awaited, extents, flags, end);
  return cudaGetLastError();
}

}  // namespace symm_overlap::cuda
