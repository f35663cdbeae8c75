// The C++ functions behind the torch ops of csrc/cuda.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "cuda/kernels.h"

namespace symm_overlap::cuda {

// The arguments for a launch of a sum, from tensors that have been checked. Partials may be in any memory that the GPU
// can read.
struct Sum {
  Dtypes dtypes;
  Partials partials;
};
Sum checked_sum(at::TensorList partials, const at::Tensor& out, const at::Tensor& copy);

// On the current stream: out = copy = the sum (or mean) of the partials, in their order; see launch_reduce. `copy` may
// be one of the partials: the thread that writes an element has read all partials of it. The partials are float32,
// float64, bfloat16 or float16. The output has their dtype, or is float32 for bfloat16 and float16.
void reduce_partials(at::TensorList partials, bool average, const at::Tensor& out,
                     const std::optional<at::Tensor>& copy);

}  // namespace symm_overlap::cuda
