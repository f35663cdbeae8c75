// The kernels of the flags of a lane (flags.h), beside the fused kernels of symm_overlap/kernels. A fused kernel may
// have left few registers and little shared memory on its multiprocessors, so these kernels use little of both.
#include "common/epoch.h"
#include "cuda/kernels.h"
#include "cuda/load.h"
#include "cuda/system_memory.cuh"

namespace symm_overlap::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void begin_flags_kernel(uint32_t* status, uint32_t caller) {
  status[kFlagEpoch] += 1;
  if (status[0] == 0) status[kFlagCaller] = caller;  // otherwise it names the first call that failed
}

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

// One block, because this is fast if nothing failed, and if something failed there is no result to be fast for.
__global__ void __launch_bounds__(kThreads)
    finish_flags_kernel(const uint32_t* status, Extents extents, uint32_t* record) {
  const uint32_t failure = load_relaxed_system(status);
  if (failure == 0) return;
  for (int e = 0; e < extents.count; ++e) {
    unsigned char* data = static_cast<unsigned char*>(extents.items[e].data);
    for (size_t i = threadIdx.x; i < extents.items[e].bytes; i += kThreads) data[i] = 0xFF;
  }
  if (threadIdx.x != 0) return;
  for (int word = 1; word < kStatusWords; ++word) record[word] = status[word];
  store_release_system(record, failure);  // the host reads this word first
}

__global__ void give_up_flags_kernel(uint32_t* status) {
  store_release_system(status, kFlagsAbandoned);
}

}  // namespace

cudaError_t load_flag_kernels() {
  return load_kernels(
      {reinterpret_cast<const void*>(begin_flags_kernel), reinterpret_cast<const void*>(raise_flag_kernel),
       reinterpret_cast<const void*>(await_flag_kernel), reinterpret_cast<const void*>(finish_flags_kernel),
       reinterpret_cast<const void*>(give_up_flags_kernel)});
}

cudaError_t launch_begin_flags(uint32_t* status, uint32_t caller, cudaStream_t stream) {
  begin_flags_kernel<<<1, 1, 0, stream>>>(status, caller);
  return cudaGetLastError();
}

cudaError_t launch_raise_flag(uint32_t* flag, const uint32_t* status, cudaStream_t stream) {
  raise_flag_kernel<<<1, 1, 0, stream>>>(flag, status);
  return cudaGetLastError();
}

cudaError_t launch_await_flag(const uint32_t* flag, const uint32_t* status, cudaStream_t stream) {
  await_flag_kernel<<<1, 1, 0, stream>>>(flag, status);
  return cudaGetLastError();
}

cudaError_t launch_finish_flags(const uint32_t* status, const Extents& extents, uint32_t* record, cudaStream_t stream) {
  finish_flags_kernel<<<1, kThreads, 0, stream>>>(status, extents, record);
  return cudaGetLastError();
}

cudaError_t launch_give_up_flags(uint32_t* status, cudaStream_t stream) {
  give_up_flags_kernel<<<1, 1, 0, stream>>>(status);
  return cudaGetLastError();
}

}  // namespace symm_overlap::cuda
