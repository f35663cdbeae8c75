#include "cuda/stream.h"

#include <exception>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace symm_overlap::cuda {

namespace {

constexpr int kPriorities = 4;  // torch has at most so many pools for each device
constexpr int kStreamsOfAPool = 32;
constexpr int kTurns = 2;  // torch hands streams out in turn, and other threads may take some meanwhile

bool captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// Returns whether any thread captures on any device: on the current stream, or on one of torch's pools of streams,
// where torch captures by default.
bool capturing_anywhere() {
  for (c10::DeviceIndex device = 0; device < c10::cuda::device_count(); ++device) {
    if (!c10::cuda::hasPrimaryContext(device)) continue;
    if (capturing(device)) return true;
    for (int priority = 0; priority > -kPriorities; --priority) {
      for (int count = 0; count < kTurns * kStreamsOfAPool; ++count) {
        if (captured(c10::cuda::getStreamFromPool(priority, device))) return true;
      }
    }
  }
  return false;
}

}  // namespace

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

bool may_free(int device) noexcept {
  try {
    if (capturing_anywhere()) return false;
    const c10::cuda::CUDAGuard guard(device);
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    return true;
  } catch (const std::exception&) {  // CUDA has failed, or this process was forked
    return false;
  }
}

}  // namespace symm_overlap::cuda
