// What the torch ops of csrc/cuda do, for callers in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace symm_overlap::cuda {

// On the current stream: out = copy = the sum (or mean) of the partials, in their order; see launch_reduce. `copy` may
// be one of the partials: whoever writes an element has read all partials of it.
void reduce_partials(at::TensorList partials, bool average, const at::Tensor& out,
                     const std::optional<at::Tensor>& copy);

}  // namespace symm_overlap::cuda
