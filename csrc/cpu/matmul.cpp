#include "cpu/matmul.h"

#include <ATen/Context.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string_view>
#include <vector>

#include "cpu/onednn_shapes.h"
#include "issue/compute.h"

// oneDNN's matmul: result = beta * result + alpha * a @ b. torch's library exports it, but its header is not installed.
// If torch is built without it, the weak symbol is null.
namespace at::native {
__attribute__((weak)) void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& result, float beta,
                                         float alpha);
}  // namespace at::native

namespace symm_overlap::cpu {

namespace {

// With fewer rows than this, a matmul spends most of its time reading the weight, and with fewer columns, reading the
// other matrix. MKL is then as fast. With fewer multiplications than this, the start of oneDNN (some 10 us) costs more
// than oneDNN saves.
constexpr int64_t kFewestRows = 8;
constexpr int64_t kFewestColumns = 8;
constexpr int64_t kFewestProducts = int64_t{1} << 20;

std::atomic<std::optional<bool>> preference{std::nullopt};

// torch multiplies float32 with MKL, whose AVX-512 code runs only on CPUs of Intel. oneDNN, which torch uses for half
// precision, has AVX-512 code for every CPU that supports it.
bool mkl_is_slow() {
#ifdef __x86_64__
  unsigned largest = 0;
  char vendor[12] = {};
  unsigned words[3] = {};
  if (__get_cpuid(0, &largest, &words[0], &words[2], &words[1])) {
    std::memcpy(vendor, words, sizeof(vendor));
  }
  return at::hasMKL() && std::string_view(vendor, sizeof(vendor)) != "GenuineIntel" &&
         __builtin_cpu_supports("avx512f");
#else
  return false;
#endif
}

// Whether oneDNN works here at all. torch may be built without it, and oneDNN may reject the matmul, for example if
// ONEDNN_MAX_CPU_ISA does not allow AVX-512.
bool onednn_works() {
  static const bool works = [] {
    if (at::native::mkldnn_matmul == nullptr || !at::hasMKLDNN()) {
      return false;
    }
    const at::Tensor a = at::ones({8, 8}), product = at::zeros({8, 8});
    try {
      at::native::mkldnn_matmul(a, a, product, 0.0f, 1.0f);
    } catch (const std::exception&) {
      return false;
    }
    return product.eq(8).all().item<bool>();
  }();
  return works;
}

// Whether rows or columns follow one another without a gap. oneDNN's wrapper first copies any other matrix, and for few
// rows this copy takes longer than the matmul.
bool packed(const at::Tensor& matrix) {
  return (matrix.stride(1) == 1 && matrix.stride(0) == matrix.size(1)) ||
         (matrix.stride(0) == 1 && matrix.stride(1) == matrix.size(0));
}

bool in_rows(const at::Tensor& matrix) {
  return matrix.stride(1) == 1 && matrix.stride(0) >= matrix.size(1);
}

bool for_onednn(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out) {
  return onednn_is_quicker() && a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat &&
         out.scalar_type() == at::kFloat && out.size(0) >= kFewestRows && out.size(1) >= kFewestColumns &&
         out.numel() * a.size(1) >= kFewestProducts && packed(a) && packed(b) && in_rows(out);
}

}  // namespace

bool onednn_is_quicker() {
  static const bool mkl_slow = mkl_is_slow();
  return preference.load().value_or(mkl_slow) && at::globalContext().userEnabledMkldnn() && onednn_works();
}

void prefer_onednn(std::optional<bool> yes) {
  preference = yes;
  forget_onednn_shapes();
}

void multiply(const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add,
              const std::optional<at::Tensor>& bias) {
  TORCH_CHECK_VALUE(a.dim() == 2 && b.dim() == 2 && out.dim() == 2 && a.size(1) == b.size(0) &&
                        out.size(0) == a.size(0) && out.size(1) == b.size(1),
                    "multiply: ", a.sizes(), " @ ", b.sizes(), " does not give ", out.sizes());
  const bool on_top = add || bias;  // of what `out` contains
  if (!(add && bias) && for_onednn(a, b, out) && onednn_may_have(a, b, out, on_top)) {
    RECORD_FUNCTION("symm_overlap::onednn_matmul", std::vector<c10::IValue>({a, b, out}));
    if (bias) out.copy_(*bias);
    at::native::mkldnn_matmul(a, b, out, on_top ? 1.0f : 0.0f, 1.0f);
  } else {
    issue::multiply(a, b, out, add, bias);
  }
}

}  // namespace symm_overlap::cpu
