// What steps compute by torch's own operators, on any kind of device.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace symm_overlap::issue {

// A product of two matrices of float8 numbers; the names are those of torch's _scaled_mm. Scales are numbers (of no
// dimension), or one for each row of `a` and one for each column of `b`.
struct Scaled {
  at::Tensor a;
  at::Tensor scale_a;
  at::Tensor b;
  at::Tensor scale_b;
  std::optional<at::Tensor> bias;
  std::optional<at::Tensor> result_scale;
  bool fast;
  bool in_float32;  // where torch has no such matmul on the device
};

// out = a @ b, or out += a @ b. Where `out` has another dtype than the factors, the product is rounded to theirs first.
void multiply(const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add);

// out = a @ b, scaled, with the bias added, in the dtype of `out`.
void multiply_scaled(const Scaled& product, at::Tensor& out);

}  // namespace symm_overlap::issue
