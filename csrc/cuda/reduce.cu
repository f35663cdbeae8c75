// Sums the partial results of all ranks in rank order. One thread adds all ranks' values of its elements, so the order
// of the additions, and with it every bit of the result, depends on nothing but the world size.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/kernels.h"
#include "cuda/load.h"

namespace symm_overlap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;  // 1024 threads with up to 64 registers each, for four loads in flight
constexpr int kVectorBytes = 16;

__device__ inline float widen(float x) {
  return x;
}
__device__ inline double widen(double x) {
  return x;
}
__device__ inline float widen(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ inline float widen(__half x) {
  return __half2float(x);
}

__device__ inline void narrow(float x, float& out) {
  out = x;
}
__device__ inline void narrow(double x, double& out) {
  out = x;
}
__device__ inline void narrow(float x, __nv_bfloat16& out) {
  out = __float2bfloat16_rn(x);
}
__device__ inline void narrow(float x, __half& out) {
  out = __float2half_rn(x);
}

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T values[kWidth];
};

// Adds the values of kRanks ranks from `first` on. All are loaded before the first is added: a thread that waits for
// one load at a time leaves most of the memory's bandwidth unused.
template <int kRanks, typename T, int kWidth, typename Sum>
__device__ inline void add_ranks(const Partials& partials, int first, int64_t i, Sum (&sum)[kWidth]) {
  Vector<T, kWidth> loaded[kRanks];
#pragma unroll
  for (int k = 0; k < kRanks; ++k) loaded[k] = static_cast<const Vector<T, kWidth>*>(partials.items[first + k])[i];
#pragma unroll
  for (int k = 0; k < kRanks; ++k) {
#pragma unroll
    for (int v = 0; v < kWidth; ++v) sum[v] += widen(loaded[k].values[v]);
  }
}

template <typename T, int kWidth>
__device__ inline void reduce_one(const Partials& partials, bool average, T* out, T* copy, int64_t i) {
  using Sum = decltype(widen(T()));
  Sum sum[kWidth];
#pragma unroll
  for (int v = 0; v < kWidth; ++v) sum[v] = -0.0;  // the one value that, added to any x, gives x: 0.0 would lose a -0.0

  int rank = 0;
#pragma unroll 1
  for (; rank + 4 <= partials.count; rank += 4) add_ranks<4, T>(partials, rank, i, sum);
  if (rank + 2 <= partials.count) {
    add_ranks<2, T>(partials, rank, i, sum);
    rank += 2;
  }
  if (rank < partials.count) add_ranks<1, T>(partials, rank, i, sum);

  Vector<T, kWidth> result;
#pragma unroll
  for (int v = 0; v < kWidth; ++v) narrow(average ? sum[v] / partials.count : sum[v], result.values[v]);
  reinterpret_cast<Vector<T, kWidth>*>(out)[i] = result;
  if (copy != nullptr) reinterpret_cast<Vector<T, kWidth>*>(copy)[i] = result;
}

// kWidth elements at a time, the last few one by one.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    reduce_kernel(const __grid_constant__ Partials partials, bool average, T* out, T* copy, int64_t n) {
  const int64_t first = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const int64_t stride = gridDim.x * static_cast<int64_t>(kThreads);
  const int64_t vectors = n / kWidth;
  for (int64_t i = first; i < vectors; i += stride) reduce_one<T, kWidth>(partials, average, out, copy, i);
  for (int64_t i = vectors * kWidth + first; i < n; i += stride) reduce_one<T, 1>(partials, average, out, copy, i);
}

bool all_aligned(const Partials& partials, const void* out, const void* copy) {
  uintptr_t bits = reinterpret_cast<uintptr_t>(out) | reinterpret_cast<uintptr_t>(copy);
  for (int i = 0; i < partials.count; ++i) bits |= reinterpret_cast<uintptr_t>(partials.items[i]);
  return bits % kVectorBytes == 0;
}

template <typename T>
cudaError_t load() {
  return load_kernels({reinterpret_cast<const void*>(reduce_kernel<T, kVectorBytes / sizeof(T)>),
                       reinterpret_cast<const void*>(reduce_kernel<T, 1>)});
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
  for (const auto load_dtype : {load<float>, load<double>, load<__nv_bfloat16>, load<__half>}) {
    const cudaError_t error = load_dtype();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_reduce(const Partials& partials, Dtype dtype, bool average, void* out, void* copy, int64_t n,
                          cudaStream_t stream) {
  if (n == 0) return cudaSuccess;  // a grid of no blocks is an error
  switch (dtype) {
    case Dtype::kFloat32:
      return launch<float>(partials, average, out, copy, n, stream);
    case Dtype::kFloat64:
      return launch<double>(partials, average, out, copy, n, stream);
    case Dtype::kBFloat16:
      return launch<__nv_bfloat16>(partials, average, out, copy, n, stream);
    case Dtype::kFloat16:
      return launch<__half>(partials, average, out, copy, n, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace symm_overlap::cuda
