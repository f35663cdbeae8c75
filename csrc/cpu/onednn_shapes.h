// Which matmuls oneDNN may compute. oneDNN generates 0.6 to 1 MB of code for each new combination of sizes, strides and
// threads, and keeps the code of the last 1024 combinations. A program whose shapes vary, for example with the length
// of its sequences, would fill 1 GB with code. torch's library does not export the function that lowers this limit, and
// the environment variable that lowers it would slow down torch's own matmuls too. So oneDNN computes only the first
// shapes of a process. All other shapes use the library that torch uses.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace symm_overlap::cpu {

constexpr size_t kMostOnednnShapes = 48;  // less than 64 MB of code

// Whether oneDNN may compute out = a @ b, or out += a @ b. For one combination, the answer and the bits of the product
// stay the same until the process ends.
bool onednn_may_have(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out, bool add);

// For tests: starts to count from 0 again. The code that oneDNN has generated stays.
void forget_onednn_shapes();

}  // namespace symm_overlap::cpu
