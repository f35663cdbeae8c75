// Copies and fills on streams. An access out of the bounds of its memory ends the process.
#include <cstring>
#include <memory>
#include <string>

#include "graphs.h"
#include "memory.h"

namespace host_gpu {

namespace {

// True for pageable memory, which CUDA cannot copy asynchronously.
bool is_pageable(const void* address) {
  Memory memory;
  return !find_memory(address, &memory);
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t handle) {
  check_bounds(to, bytes, "a write");
  check_bounds(from, bytes, "a read");
  Stream& stream = stream_of(handle);
  if (is_pageable(from) && stream.capture == nullptr) {  // the caller may change it as soon as this returns
    const auto staged = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
    return enqueue(handle, [=] { std::memcpy(to, staged->data(), bytes); });
  }
  const cudaError_t error = enqueue(handle, [=] { std::memcpy(to, from, bytes); });
  if (is_pageable(to) && stream.capture == nullptr) stream.drain();  // the caller may read it as soon as this returns
  return error;
}

}  // namespace

}  // namespace host_gpu

using namespace host_gpu;

CUDA_FUNCTION cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                          cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}

CUDA_FUNCTION cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}

CUDA_FUNCTION cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (forbidden_in_capture(__func__)) return result(cudaErrorStreamCaptureUnsupported);
  const cudaError_t error = copy(to, from, bytes, nullptr);
  stream_of(nullptr).drain();
  return error;
}

CUDA_FUNCTION cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                            size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  if (width > to_pitch || width > from_pitch) return result(cudaErrorInvalidPitchValue);
  if (height == 0) return cudaSuccess;
  if (is_pageable(to) || is_pageable(from)) stop("copies of rows of pageable memory are not imitated");
  check_bounds(to, to_pitch * (height - 1) + width, "a write");
  check_bounds(from, from_pitch * (height - 1) + width, "a read");
  return enqueue(stream, [=] {
    for (size_t row = 0; row < height; ++row) {
      std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    }
  });
}

CUDA_FUNCTION cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  check_bounds(to, bytes, "a write");
  return enqueue(stream, [=] { std::memset(to, value, bytes); });
}

CUDA_FUNCTION cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (forbidden_in_capture(__func__)) return result(cudaErrorStreamCaptureUnsupported);
  const cudaError_t error = cudaMemsetAsync(to, value, bytes, nullptr);
  stream_of(nullptr).drain();
  return error;
}
