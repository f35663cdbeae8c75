#include "cpu/reduce.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>

// The package is built for the baseline instruction set. For these loops, the widest vectors are chosen at load time.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SYMM_OVERLAP_VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SYMM_OVERLAP_VECTOR_CLONES
#endif

namespace symm_overlap::cpu {

namespace {

constexpr int64_t kBlock = 2048;  // elements accumulated at a time, so that the accumulator stays in the L1 cache

float widen(float x) {
  return x;
}
double widen(double x) {
  return x;
}

// bfloat16 is the upper half of a float32.
struct BFloat16Bits {
  uint16_t bits;
};
float widen(BFloat16Bits x) {
  const uint32_t word = uint32_t{x.bits} << 16;
  float value;
  __builtin_memcpy(&value, &word, sizeof(value));
  return value;
}

float widen(c10::Half x) {
  return static_cast<float>(x);
}

template <typename Acc, typename T>
inline __attribute__((always_inline)) void accumulate_loop(Acc* acc, const T* x, int64_t n, bool first) {
  if (first) {
    for (int64_t i = 0; i < n; ++i) {
      acc[i] = widen(x[i]);
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      acc[i] += widen(x[i]);
    }
  }
}

SYMM_OVERLAP_VECTOR_CLONES void accumulate(float* acc, const float* x, int64_t n, bool first) {
  accumulate_loop(acc, x, n, first);
}
SYMM_OVERLAP_VECTOR_CLONES void accumulate(double* acc, const double* x, int64_t n, bool first) {
  accumulate_loop(acc, x, n, first);
}
SYMM_OVERLAP_VECTOR_CLONES void accumulate(float* acc, const BFloat16Bits* x, int64_t n, bool first) {
  accumulate_loop(acc, x, n, first);
}
void accumulate(float* acc, const c10::Half* x, int64_t n, bool first) {
  accumulate_loop(acc, x, n, first);
}

template <typename Out, typename Acc>
void round_to(Out* out, const Acc* acc, int64_t n, Acc divisor) {
  // Divide instead of multiplying by the reciprocal: avg is then exact whenever torch's avg is exact.
  for (int64_t i = 0; i < n; ++i) {
    out[i] = static_cast<Out>(divisor == 1 ? acc[i] : acc[i] / divisor);
  }
}

template <typename Out, typename Load, typename Acc>
void reduce_as(const std::vector<at::Tensor>& partials, const at::Tensor& out, bool average) {
  const Acc divisor = average ? static_cast<Acc>(partials.size()) : Acc{1};
  Out* result = out.data_ptr<Out>();
  at::parallel_for(0, out.numel(), 16 * kBlock, [&](int64_t begin, int64_t end) {
    Acc acc[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t n = std::min(kBlock, end - at);
      for (size_t rank = 0; rank < partials.size(); ++rank) {
        accumulate(acc, static_cast<const Load*>(partials[rank].const_data_ptr()) + at, n, rank == 0);
      }
      round_to(result + at, acc, n, divisor);
    }
  });
}

// Half precision is rounded to itself, or stays in the float32 in which it was added.
template <typename Half, typename Load>
void reduce_half(const std::vector<at::Tensor>& partials, const at::Tensor& out, bool average) {
  if (out.scalar_type() == at::kFloat) {
    reduce_as<float, Load, float>(partials, out, average);
  } else {
    reduce_as<Half, Load, float>(partials, out, average);
  }
}

}  // namespace

void reduce(const std::vector<at::Tensor>& partials, const at::Tensor& out, bool average) {
  TORCH_CHECK_VALUE(!partials.empty() && out.is_contiguous(),
                    "symm_overlap: reduce needs partials and a contiguous output");
  const at::ScalarType dtype = partials[0].scalar_type();
  const bool widens = (dtype == at::kBFloat16 || dtype == at::kHalf) && out.scalar_type() == at::kFloat;
  for (const at::Tensor& partial : partials) {
    TORCH_CHECK_VALUE(partial.is_contiguous() && partial.scalar_type() == dtype && partial.numel() == out.numel() &&
                          (widens || dtype == out.scalar_type()),
                      "symm_overlap: reduce: a partial of shape ", partial.sizes(), " and dtype ",
                      partial.scalar_type(), " does not match the output of shape ", out.sizes(), " and dtype ",
                      out.scalar_type());
  }
  switch (dtype) {
    case at::kFloat:
      return reduce_as<float, float, float>(partials, out, average);
    case at::kDouble:
      return reduce_as<double, double, double>(partials, out, average);
    case at::kBFloat16:
      return reduce_half<at::BFloat16, BFloat16Bits>(partials, out, average);
    case at::kHalf:
      return reduce_half<at::Half, at::Half>(partials, out, average);
    default:
      TORCH_CHECK_TYPE(false, "symm_overlap: reduce takes float32, float64, bfloat16 or float16, not ", dtype);
  }
}

}  // namespace symm_overlap::cpu
