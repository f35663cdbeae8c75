// Loading kernels ahead of their first launch.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>

namespace symm_overlap::cuda {

// CUDA loads a kernel's code when it is first used, and may wait until nothing runs on the GPU before it loads it. This
// would be a deadlock if a running wait needs a signal that the kernel to be loaded would send. Asking for a kernel's
// attributes loads the kernel.
inline cudaError_t load_kernels(std::initializer_list<const void*> kernels) {
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace symm_overlap::cuda
