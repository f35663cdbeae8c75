#include "cuda/stream.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

namespace symm_overlap::cuda {

int64_t new_stream(int device, bool high_priority) {
  c10::cuda::CUDAGuard guard(device);
  int lowest = 0;
  int highest = 0;
  C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  cudaStream_t stream = nullptr;
  // 0 is the priority of ordinary streams. It is also the lowest.
  C10_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, high_priority ? highest : 0));
  return reinterpret_cast<int64_t>(stream);
}

bool capturing(int device) {
  const c10::cuda::CUDAGuard guard(device);
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

}  // namespace symm_overlap::cuda
