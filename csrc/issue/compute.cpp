#include "issue/compute.h"

#include <ATen/ops/_scaled_mm.h>  // private; checked with torch 2.11 and 2.13
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <cstdint>

namespace symm_overlap::issue {

namespace {

// cuBLAS reads the scales of rows only from addresses that are multiples of 16 bytes.
at::Tensor aligned(const at::Tensor& scale) {
  const bool is_number = scale.dim() == 0;
  return is_number || reinterpret_cast<uintptr_t>(scale.const_data_ptr()) % 16 == 0 ? scale : scale.clone();
}

// Applies the result scale to `sum` if `out` is float8. On CPU torch divides by the scale, on GPUs it multiplies by it.
void rescale(at::Tensor& sum, const Scaled& product, const at::Tensor& out) {
  if (!product.result_scale || at::elementSize(out.scalar_type()) != 1) return;
  const at::Tensor scale = product.result_scale->reshape({});
  const bool divides = out.is_cpu() && !product.in_float32;
  divides ? sum.div_(scale) : sum.mul_(scale);
}

// Float32 can represent the product of any two float8 numbers.
void multiply_in_float32(const Scaled& product, const std::optional<at::Tensor>& bias, at::Tensor& out) {
  at::Tensor sum = at::mm(product.a.to(at::kFloat), product.b.to(at::kFloat));
  sum.mul_(product.scale_a).mul_(product.scale_b);
  if (bias) sum.add_(*bias);
  rescale(sum, product, out);
  out.copy_(sum);
}

}  // namespace

void multiply(const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add,
              const std::optional<at::Tensor>& bias) {
  if (out.scalar_type() != a.scalar_type() || (add && bias)) {
    // If `a` is some columns of a matrix, the columns after them may not have arrived yet. In bfloat16 on CPUs with
    // AMX, torch 2.13 multiplies some of those columns by zero, and a NaN times zero is not zero.
    const at::Tensor left = a.is_cpu() ? a.contiguous() : a;
    const at::Tensor product = bias ? at::addmm(*bias, left, b) : at::mm(left, b);
    add ? out.add_(product) : out.copy_(product);
  } else if (add) {
    out.addmm_(a, b);
  } else if (bias) {
    at::addmm_out(out, *bias, a, b);
  } else {
    at::mm_out(out, a, b);
  }
}

void multiply_scaled(const Scaled& product, at::Tensor& out) {
  // On CPU, torch 2.13 reads a bias as if it were contiguous, and does not write the output if `a` has no columns.
  const auto bias = product.bias ? std::optional(product.bias->flatten().contiguous()) : std::nullopt;
  if (product.in_float32) {
    multiply_in_float32(product, bias, out);
  } else if (product.a.size(1) != 0) {
    at::_scaled_mm_out(out, product.a, product.b, aligned(product.scale_a), aligned(product.scale_b), bias,
                       product.result_scale, out.scalar_type(), product.fast);
  } else if (bias) {
    at::Tensor sum = bias->to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    rescale(sum, product, out);
    out.copy_(sum.expand_as(out));
  } else {
    out.zero_();
  }
}

}  // namespace symm_overlap::issue
