// A matmul into a preallocated output, by the library that is fastest on this CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace symm_overlap::cpu {

// Computes out = a @ b, or out += a @ b, for matrices of one dtype. None may be a lazily negated view. `out` may have
// another dtype, and there may be a bias; see issue/compute.h. The choice of the library depends on the machine, dtype,
// sizes, strides and number of threads, and on whether the process had reached its limit of oneDNN shapes
// (onednn_shapes.h) when it first computed this combination. So a repeated call gives the same bits.
void multiply(const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add,
              const std::optional<at::Tensor>& bias);

// Whether large float32 matrices are multiplied by oneDNN here.
bool onednn_is_quicker();

// For tests: overrides the answer of `onednn_is_quicker` if oneDNN works here. nullopt restores the answer for this
// CPU. The count of oneDNN shapes starts from 0 again.
void prefer_onednn(std::optional<bool> yes);

}  // namespace symm_overlap::cpu
