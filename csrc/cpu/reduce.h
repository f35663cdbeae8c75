// The reduction of a reduce-scatter: partial sums in fixed rank order, accumulated in float32 (float64 for double).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace symm_overlap::cpu {

// out = partials[0] + partials[1] + ... (divided by their number if `average`), rounded once. All tensors must be
// contiguous and have the same number of elements. The partials have one dtype: float32, float64, bfloat16 or float16.
// The output has it too, or is float32, and then sums of bfloat16 or float16 are not rounded.
void reduce(const std::vector<at::Tensor>& partials, const at::Tensor& out, bool average);

}  // namespace symm_overlap::cpu
