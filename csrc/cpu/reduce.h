// The reduction of a reduce-scatter: partial sums in fixed rank order, accumulated in float32 (float64 for double).
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace symm_overlap::cpu {

// out = partials[0] + partials[1] + ... (divided by their number when `average`), rounded once. All of one shape and
// dtype, each contiguous; dtypes float32, float64, bfloat16, float16.
void reduce(const std::vector<at::Tensor>& partials, const at::Tensor& out, bool average);

}  // namespace symm_overlap::cpu
