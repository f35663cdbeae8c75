// A matmul into a preallocated output, by the library that is quickest on this CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace symm_overlap::cpu {

// out = a @ b, or out += a @ b, of matrices of one dtype, none of them a lazily negated view. `out` may have another
// dtype; see issue/compute.h. The library depends on the machine, dtype, sizes, strides and number of threads, and on
// whether the process had come to its limit of oneDNN shapes (onednn_shapes.h) when it first met these. So a repeated
// call gives the same bits.
void multiply(const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add);

// Whether large float32 matrices go to oneDNN here.
bool onednn_is_quicker();

// For tests: says so, wherever oneDNN works; nullopt for what this CPU is known to be. oneDNN's shapes are counted from
// 0 again.
void prefer_onednn(std::optional<bool> yes);

}  // namespace symm_overlap::cpu
