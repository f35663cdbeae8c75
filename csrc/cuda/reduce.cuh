// Sums of the partial results of all ranks in rank order: the code that kernels share. One thread adds all ranks'
// values of its elements. So the order of the additions, and with it every bit of the result, depends only on the world
// size.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/kernels.h"

namespace symm_overlap::cuda {

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

// Eight float32 values are stored as two vectors, as memory is only known to be aligned for one.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth < kVectorBytes ? sizeof(T) * kWidth : kVectorBytes) Vector {
  T values[kWidth];
};

// Adds the values of kRanks ranks, from rank `first` on. All are loaded before the first is added, because a thread
// that waits for one load at a time leaves most of the memory's bandwidth unused.
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

template <typename T, typename Out, int kWidth>
__device__ inline void reduce_one(const Partials& partials, bool average, Out* out, Out* copy, int64_t i) {
  using Sum = decltype(widen(T()));
  Sum sum[kWidth];
#pragma unroll
  for (int v = 0; v < kWidth; ++v) sum[v] = -0.0;  // -0.0 + x is x for every x; 0.0 would turn -0.0 into 0.0

  int rank = 0;
#pragma unroll 1
  for (; rank + 4 <= partials.count; rank += 4) add_ranks<4, T>(partials, rank, i, sum);
  if (rank + 2 <= partials.count) {
    add_ranks<2, T>(partials, rank, i, sum);
    rank += 2;
  }
  if (rank < partials.count) add_ranks<1, T>(partials, rank, i, sum);

  Vector<Out, kWidth> result;
#pragma unroll
  for (int v = 0; v < kWidth; ++v) narrow(average ? sum[v] / partials.count : sum[v], result.values[v]);
  reinterpret_cast<Vector<Out, kWidth>*>(out)[i] = result;
  if (copy != nullptr) reinterpret_cast<Vector<Out, kWidth>*>(copy)[i] = result;
}

// Sums all elements, with all threads of the grid: kWidth elements at a time, and the last few one by one.
template <typename T, typename Out, int kWidth>
__device__ inline void reduce_all(const Partials& partials, bool average, Out* out, Out* copy, int64_t n) {
  const int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int64_t stride = gridDim.x * static_cast<int64_t>(blockDim.x);
  const int64_t vectors = n / kWidth;
  for (int64_t i = first; i < vectors; i += stride) reduce_one<T, Out, kWidth>(partials, average, out, copy, i);
  for (int64_t i = vectors * kWidth + first; i < n; i += stride) reduce_one<T, Out, 1>(partials, average, out, copy, i);
}

// Whether all memory is aligned for reading and writing vectors.
inline bool all_aligned(const Partials& partials, const void* out, const void* copy) {
  uintptr_t bits = reinterpret_cast<uintptr_t>(out) | reinterpret_cast<uintptr_t>(copy);
  for (int i = 0; i < partials.count; ++i) bits |= reinterpret_cast<uintptr_t>(partials.items[i]);
  return bits % kVectorBytes == 0;
}

// The element types of a sum: of its partials, and of its output.
template <typename T, typename Out>
struct Types {
  using Partial = T;
  using Output = Out;
};

// Calls `with` with the `Types` for dtypes that fit each other: see `launch_reduce`.
template <typename With>
cudaError_t with_dtypes(Dtypes dtypes, With&& with) {
  const bool widens = dtypes.out == Dtype::kFloat32;
  if (!widens && dtypes.out != dtypes.partials) return cudaErrorInvalidValue;
  switch (dtypes.partials) {
    case Dtype::kFloat32:
      return with(Types<float, float>());
    case Dtype::kFloat64:
      return widens ? cudaErrorInvalidValue : with(Types<double, double>());
    case Dtype::kBFloat16:
      return widens ? with(Types<__nv_bfloat16, float>()) : with(Types<__nv_bfloat16, __nv_bfloat16>());
    case Dtype::kFloat16:
      return widens ? with(Types<__half, float>()) : with(Types<__half, __half>());
  }
  return cudaErrorInvalidValue;
}

// Calls `with` for all dtypes that fit each other, up to the first error.
template <typename With>
cudaError_t with_all_dtypes(With&& with) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat64, Dtype::kBFloat16, Dtype::kFloat16}) {
    const cudaError_t error = with_dtypes({dtype, dtype}, with);
    if (error != cudaSuccess) return error;
  }
  for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16}) {
    const cudaError_t error = with_dtypes({dtype, Dtype::kFloat32}, with);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace symm_overlap::cuda
