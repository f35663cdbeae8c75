// Launches of kernels that Triton has compiled, without Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include <vector>

#include "issue/kernel.h"

namespace symm_overlap::cuda {

// Launches a kernel with the addresses of these tensors. Its module must be loaded on the current device. Throws if the
// driver rejects the launch.
void launch_kernel(const issue::Kernel& kernel, const std::vector<at::Tensor>& tensors, cudaStream_t stream);

}  // namespace symm_overlap::cuda
