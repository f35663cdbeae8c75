#include "cuda/copy.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace symm_overlap::cuda {

cudaError_t copy_beside(void* to, const void* from, size_t bytes, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  if (stream != nullptr && cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
      status == cudaStreamCaptureStatusNone) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t first = 0;
    if (cudaMemcpyBatchAsync(&to, &from, &bytes, 1, &attributes, &first, 1, stream) == cudaSuccess) return cudaSuccess;
  }
  (void)cudaGetLastError();  // an ordinary copy will tell if CUDA itself has failed
#endif
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}

void copy_tensor_beside(const at::Tensor& to, const at::Tensor& from) {
  const at::Tensor& on_gpu = to.is_cuda() ? to : from;
  TORCH_CHECK_VALUE(on_gpu.is_cuda(), "one of the two tensors must be on a GPU; got ", to.toString(), " and ",
                    from.toString());
  const c10::cuda::CUDAGuard guard(on_gpu.device());
  if (to.sizes() != from.sizes() || to.scalar_type() != from.scalar_type() || !to.is_contiguous() ||
      !from.is_contiguous()) {
    to.copy_(from, /*non_blocking=*/true);
  } else if (to.nbytes() != 0) {
    C10_CUDA_CHECK(
        copy_beside(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes(), c10::cuda::getCurrentCUDAStream()));
  }
}

}  // namespace symm_overlap::cuda
