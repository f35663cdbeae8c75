// The sleep kernel. It delays one stream by about the uncertainty of a launch time, so that another stream's kernel
// starts first.
#include "cuda/kernels.h"
#include "cuda/load.h"

namespace symm_overlap::cuda {
namespace {

__global__ void sleep_kernel(int64_t cycles) {
  const int64_t start = clock64();
  while (clock64() - start < cycles) {
  }
}

}  // namespace

cudaError_t load_sleep_kernel() {
  return load_kernels({reinterpret_cast<const void*>(sleep_kernel)});
}

cudaError_t launch_sleep(int64_t cycles, cudaStream_t stream) {
  sleep_kernel<<<1, 1, 0, stream>>>(cycles);
  return cudaGetLastError();
}

}  // namespace symm_overlap::cuda
