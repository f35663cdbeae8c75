// Copies that leave the multiprocessors to the kernels that run at the same time.
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include <cstddef>

namespace symm_overlap::cuda {

// Copies bytes, with a copy engine if possible. Between two GPUs, every copy uses one. But CUDA copies within one GPU
// by a kernel, unless it is asked not to. Beside a persistent matmul, such a kernel would get the one multiprocessor
// that is left, and would be much slower than a link. CUDA can be asked only from version 13 on, not on the default
// stream, and not for a captured stream as far as this project knows. In these cases this is an ordinary copy.
cudaError_t copy_beside(void* to, const void* from, size_t bytes, cudaStream_t stream);

// The same for tensors, on the current stream of their GPU. Tensors that are not both contiguous, or whose dtypes
// differ, are copied as torch copies them. The host does not wait.
void copy_tensor_beside(const at::Tensor& to, const at::Tensor& from);

}  // namespace symm_overlap::cuda
