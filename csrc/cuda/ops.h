// What the torch ops of csrc/cuda do, for callers in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "cuda/kernels.h"

namespace symm_overlap::cuda {

// What launches of a sum take, of tensors that have been checked. Partials may lie wherever the GPU can read.
struct Sum {
  Dtype dtype;
  Partials partials;
};
Sum checked_sum(at::TensorList partials, const at::Tensor& out, const at::Tensor& copy);

// On the current stream: out = copy = the sum (or mean) of the partials, in their order; see launch_reduce. `copy` may
// be one of the partials: whoever writes an element has read all partials of it.
void reduce_partials(at::TensorList partials, bool average, const at::Tensor& out,
                     const std::optional<at::Tensor>& copy);

}  // namespace symm_overlap::cuda
