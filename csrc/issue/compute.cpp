#include "issue/compute.h"

#include <ATen/ops/_scaled_mm.h>  // private; checked with torch 2.11 and 2.13
#include <ATen/ops/mm.h>

#include <cstdint>

namespace symm_overlap::issue {

namespace {

// cuBLAS reads scales of rows from addresses that are multiples of 16 bytes only.
at::Tensor aligned(const at::Tensor& scale) {
  const bool is_number = scale.dim() == 0;
  return is_number || reinterpret_cast<uintptr_t>(scale.const_data_ptr()) % 16 == 0 ? scale : scale.clone();
}

}  // namespace

void multiply(const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add) {
  if (out.scalar_type() != a.scalar_type()) {
    const at::Tensor product = at::mm(a, b);
    add ? out.add_(product) : out.copy_(product);
  } else if (add) {
    out.addmm_(a, b);
  } else {
    at::mm_out(out, a, b);
  }
}

void multiply_scaled(const Scaled& product, at::Tensor& out) {
  // On CPU, torch 2.13 reads a bias as if its numbers lay together, and without columns leaves the output unwritten.
  const auto bias = product.bias ? std::optional(product.bias->flatten().contiguous()) : std::nullopt;
  if (product.a.size(1) != 0) {
    at::_scaled_mm_out(out, product.a, product.b, aligned(product.scale_a), aligned(product.scale_b), bias,
                       product.result_scale, out.scalar_type(), product.fast);
  } else if (bias) {
    out.copy_(bias->expand_as(out));
  } else {
    out.zero_();
  }
}

}  // namespace symm_overlap::issue
