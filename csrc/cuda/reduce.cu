// Sums the partial results of all ranks, which have already arrived.
#include <type_traits>

#include "cuda/load.h"
#include "cuda/reduce.cuh"

namespace symm_overlap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;  // 1024 threads with up to 64 registers each, for four loads in flight

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    reduce_kernel(const __grid_constant__ Partials partials, bool average, T* out, T* copy, int64_t n) {
  reduce_all<T, kWidth>(partials, average, out, copy, n);
}

template <typename T>
cudaError_t launch(const Partials& partials, bool average, void* out, void* copy, int64_t n, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;

  const bool vectorised = all_aligned(partials, out, copy);
  const int64_t items = vectorised ? (n + kWidth - 1) / kWidth : n;
  const int64_t needed = (items + kThreads - 1) / kThreads;
  const int64_t most = static_cast<int64_t>(multiprocessors) * kBlocksPerMultiprocessor;
  const unsigned blocks = static_cast<unsigned>(needed < most ? needed : most);
  const auto kernel = vectorised ? reduce_kernel<T, kWidth> : reduce_kernel<T, 1>;
  kernel<<<blocks, kThreads, 0, stream>>>(partials, average, static_cast<T*>(out), static_cast<T*>(copy), n);
  return cudaGetLastError();
}

}  // namespace

cudaError_t load_reduce_kernels() {
  return with_every_dtype([](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    return load_kernels({reinterpret_cast<const void*>(reduce_kernel<T, kVectorBytes / sizeof(T)>),
                         reinterpret_cast<const void*>(reduce_kernel<T, 1>)});
  });
}

cudaError_t launch_reduce(const Partials& partials, Dtype dtype, bool average, void* out, void* copy, int64_t n,
                          cudaStream_t stream) {
  if (n == 0) return cudaSuccess;  // a grid of no blocks is an error
  return with_dtype(dtype, [&](auto* typed) {
    return launch<std::remove_pointer_t<decltype(typed)>>(partials, average, out, copy, n, stream);
  });
}

}  // namespace symm_overlap::cuda
