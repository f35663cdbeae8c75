// A matmul into memory that is there, by the library that is quickest on this CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace symm_overlap::cpu {

// out = a @ b, or out += a @ b, of matrices of one dtype, none of them a lazily negated view. The library depends on
// the machine, dtype, sizes and strides only, so a repeated call gives the same bits.
void multiply(const at::Tensor& a, const at::Tensor& b, at::Tensor out, bool add);

// Whether large float32 matrices go to oneDNN here.
bool onednn_is_quicker();

// For tests: says so, wherever oneDNN works; nullopt for what this CPU is known to be.
void prefer_onednn(std::optional<bool> yes);

}  // namespace symm_overlap::cpu
