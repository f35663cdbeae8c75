// Loading kernels ahead of their first launch.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>

namespace symm_overlap::cuda {

// CUDA loads a kernel's code when it is first used, and for that may wait until nothing runs on the GPU: for ever, if
// what runs is a wait for a signal that the kernel to be loaded would send. Asking for a kernel's attributes loads it.
inline cudaError_t load_kernels(std::initializer_list<const void*> kernels) {
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace symm_overlap::cuda
