// A matmul into memory that is there, by the library that is quickest on this CPU.
#pragma once

#include <ATen/core/Tensor.h>

namespace symm_overlap::cpu {

// out = a @ b, or out += a @ b, of matrices of one dtype. The library depends on the machine, dtype, sizes and strides
// only, so a repeated call gives the same bits.
void multiply(const at::Tensor& a, const at::Tensor& b, at::Tensor out, bool add);

// Whether large float32 matrices go to oneDNN here.
bool onednn_is_quicker();

}  // namespace symm_overlap::cpu
