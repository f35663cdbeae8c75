#include "cpu/matmul.h"

#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/record_function.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

#include <cstdint>
#include <cstring>
#include <string_view>

// oneDNN's matmul: result = beta * result + alpha * a @ b. torch's library exports it, but the header is not among
// those that are installed. A torch without it leaves the weak symbol null.
namespace at::native {
__attribute__((weak)) void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& result, float beta,
                                         float alpha);
}  // namespace at::native

namespace symm_overlap::cpu {

namespace {

// Under so many rows a matmul does little but read the weight, and MKL is as quick; under so many multiplications, what
// oneDNN needs before it starts (some 10 us) is more than it saves.
constexpr int64_t kFewestRows = 8;
constexpr int64_t kFewestProducts = int64_t{1} << 20;

bool is_intel() {
#ifdef __x86_64__
  unsigned largest = 0;
  char vendor[12] = {};
  unsigned words[3] = {};
  if (__get_cpuid(0, &largest, &words[0], &words[2], &words[1])) {
    std::memcpy(vendor, words, sizeof(vendor));
  }
  return std::string_view(vendor, sizeof(vendor)) == "GenuineIntel";
#else
  return false;
#endif
}

bool has_avx512() {
#ifdef __x86_64__
  return __builtin_cpu_supports("avx512f") != 0;
#else
  return false;
#endif
}

// Strides for which oneDNN has quick code: rows or columns that lie together. For others it is slower by orders of
// magnitude.
bool lies_in_rows(const at::Tensor& matrix) {
  return matrix.stride(1) == 1 && matrix.stride(0) >= matrix.size(1);
}

bool lies_in_rows_or_columns(const at::Tensor& matrix) {
  return lies_in_rows(matrix) || (matrix.stride(0) == 1 && matrix.stride(1) >= matrix.size(0));
}

bool for_onednn(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out) {
  return onednn_is_quicker() && a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat &&
         out.scalar_type() == at::kFloat && out.size(0) >= kFewestRows && out.numel() * a.size(1) >= kFewestProducts &&
         lies_in_rows_or_columns(a) && lies_in_rows_or_columns(b) && lies_in_rows(out);
}

}  // namespace

// torch multiplies float32 with MKL, whose AVX-512 code runs on Intel's CPUs only. oneDNN, with which torch multiplies
// half precision, has such code for every CPU that understands it.
bool onednn_is_quicker() {
  static const bool quicker =
      at::native::mkldnn_matmul != nullptr && at::hasMKL() && at::hasMKLDNN() && has_avx512() && !is_intel();
  return quicker && at::globalContext().userEnabledMkldnn();
}

void multiply(const at::Tensor& a, const at::Tensor& b, at::Tensor out, bool add) {
  TORCH_CHECK_VALUE(a.dim() == 2 && b.dim() == 2 && out.dim() == 2 && a.size(1) == b.size(0) &&
                        out.size(0) == a.size(0) && out.size(1) == b.size(1),
                    "multiply: ", a.sizes(), " @ ", b.sizes(), " does not give ", out.sizes());
  if (for_onednn(a, b, out)) {
    RECORD_FUNCTION("symm_overlap::onednn_matmul", std::vector<c10::IValue>({a, b, out}));
    at::native::mkldnn_matmul(a, b, out, add ? 1.0f : 0.0f, 1.0f);
  } else if (add) {
    out.addmm_(a, b);
  } else {
    at::mm_out(out, a, b);
  }
}

}  // namespace symm_overlap::cpu
