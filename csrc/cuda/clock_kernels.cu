// Kernels of benchmarks that read the GPU's clock: one emulates the pace of a link, the other records a time.
#include "cuda/kernels.h"
#include "cuda/load.h"
#include "cuda/system_memory.cuh"

namespace symm_overlap::cuda {
namespace {

constexpr uint32_t kPauseNs = 64;
// There are two launches between two consecutive copies of a stream. Their time does not count as idle time of the
// link.
constexpr int64_t kLaunchesNs = 5000;

// Several streams share the link. Each reserves its time on the link by one atomic operation.
__global__ void pace_kernel(unsigned long long* link, int64_t ns) {
  if (ns == 0) {
    const int64_t now = global_nanoseconds();
    if (now > static_cast<int64_t>(atomicAdd(link, 0)) + kLaunchesNs) {
      atomicMax(link, static_cast<unsigned long long>(now));
    }
    return;
  }
  const int64_t end = static_cast<int64_t>(atomicAdd(link, static_cast<unsigned long long>(ns))) + ns;
  while (global_nanoseconds() < end) pause(kPauseNs);
}

__global__ void stamp_kernel(int64_t* time) {
  *time = global_nanoseconds();
}

}  // namespace

cudaError_t load_clock_kernels() {
  return load_kernels({reinterpret_cast<const void*>(pace_kernel), reinterpret_cast<const void*>(stamp_kernel)});
}

cudaError_t launch_pace(uint64_t* link, int64_t ns, cudaStream_t stream) {
  pace_kernel<<<1, 1, 0, stream>>>(reinterpret_cast<unsigned long long*>(link), ns);
  return cudaGetLastError();
}

cudaError_t launch_stamp(int64_t* time, cudaStream_t stream) {
  stamp_kernel<<<1, 1, 0, stream>>>(time);
  return cudaGetLastError();
}

}  // namespace symm_overlap::cuda
