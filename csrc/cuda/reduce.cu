// Sums the partial results of all ranks, which have already arrived.
#include "cuda/load.h"
#include "cuda/reduce.cuh"

namespace symm_overlap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;  // 1024 threads with up to 64 registers each, for four loads in flight

template <typename T, typename Out, int kWidth>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    reduce_kernel(const __grid_constant__ Partials partials, bool average, Out* out, Out* copy, int64_t n) {
  reduce_all<T, Out, kWidth>(partials, average, out, copy, n);
}

template <typename T, typename Out>
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
  const auto kernel = vectorised ? reduce_kernel<T, Out, kWidth> : reduce_kernel<T, Out, 1>;
  kernel<<<blocks, kThreads, 0, stream>>>(partials, average, static_cast<Out*>(out), static_cast<Out*>(copy), n);
  return cudaGetLastError();
}

}  // namespace

cudaError_t load_reduce_kernels() {
  return with_all_dtypes([](auto types) {
    using T = typename decltype(types)::Partial;
    using Out = typename decltype(types)::Output;
    return load_kernels({reinterpret_cast<const void*>(reduce_kernel<T, Out, kVectorBytes / sizeof(T)>),
                         reinterpret_cast<const void*>(reduce_kernel<T, Out, 1>)});
  });
}

cudaError_t launch_reduce(const Partials& partials, Dtypes dtypes, bool average, void* out, void* copy, int64_t n,
                          cudaStream_t stream) {
  if (n == 0) return cudaSuccess;  // a grid of no blocks is an error
  return with_dtypes(dtypes, [&](auto types) {
    using T = typename decltype(types)::Partial;
    using Out = typename decltype(types)::Output;
    return launch<T, Out>(partials, average, out, copy, n, stream);
  });
}

}  // namespace symm_overlap::cuda
