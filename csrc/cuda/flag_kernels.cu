// The kernels of the flags of a lane (flags.h), beside the fused kernels of symm_overlap/kernels. A fused kernel may
// have left few registers and little shared memory on its multiprocessors, so these kernels use little of both.
#include "common/epoch.h"
#include "cuda/kernels.h"
#include "cuda/load.h"
#include "cuda/system_memory.cuh"

namespace symm_overlap::cuda {
namespace {

// A reader that sees the flag also sees everything that the stream did before.
__global__ void raise_flag_kernel(uint32_t* flag, const uint32_t* status) {
  store_release_system(flag, status[kFlagEpoch]);
}

__global__ void await_flag_kernel(const uint32_t* flag, const uint32_t* status) {
  constexpr uint32_t kPauseNs = 128;
  const uint32_t epoch = status[kFlagEpoch];
  while (!epoch_reached(load_relaxed_system(flag), epoch) && load_relaxed_system(status) == 0) pause(kPauseNs);
  (void)load_acquire_system(flag);
}

__global__ void give_up_flags_kernel(uint32_t* status) {
  store_release_system(status, kFlagsAbandoned);
}

}  // namespace

cudaError_t load_flag_kernels() {
  return load_kernels({reinterpret_cast<const void*>(raise_flag_kernel),
                       reinterpret_cast<const void*>(await_flag_kernel),
                       reinterpret_cast<const void*>(give_up_flags_kernel)});
}

cudaError_t launch_raise_flag(uint32_t* flag, const uint32_t* status, cudaStream_t stream) {
  raise_flag_kernel<<<1, 1, 0, stream>>>(flag, status);
  return cudaGetLastError();
}

cudaError_t launch_await_flag(const uint32_t* flag, const uint32_t* status, cudaStream_t stream) {
  await_flag_kernel<<<1, 1, 0, stream>>>(flag, status);
  return cudaGetLastError();
}

cudaError_t launch_give_up_flags(uint32_t* status, cudaStream_t stream) {
  give_up_flags_kernel<<<1, 1, 0, stream>>>(status);
  return cudaGetLastError();
}

}  // namespace symm_overlap::cuda
