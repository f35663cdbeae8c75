// The computations of steps that use torch's own operators, on any kind of device.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace symm_overlap::issue {

// A product of two float8 matrices. The names are those of torch's _scaled_mm. A scale is one number (without a
// dimension), or there is one for each row of `a` and one for each column of `b`.
struct Scaled {
  at::Tensor a;
  at::Tensor scale_a;
  at::Tensor b;
  at::Tensor scale_b;
  std::optional<at::Tensor> bias;
  std::optional<at::Tensor> result_scale;
  bool fast;
  bool in_float32;  // for devices on which torch has no such matmul
};

// out = a @ b, or out += a @ b. A bias, a number for each column, is added to a @ b before the product is rounded. If
// `out` has another dtype than the factors, or if a product with a bias is added to it, the product is first rounded to
// the dtype of the factors.
void multiply(const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add,
              const std::optional<at::Tensor>& bias);

// out = a @ b, with the scales applied and the bias added, in the dtype of `out`.
void multiply_scaled(const Scaled& product, at::Tensor& out);

}  // namespace symm_overlap::issue
