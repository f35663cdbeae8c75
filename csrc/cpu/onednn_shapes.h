// Which matmuls oneDNN may do. It generates code for each new combination of sizes, strides and threads, 0.6 to 1 MB
// of it, and keeps the code of the last 1024 of them. A program whose shapes vary, for example with the length of its
// sequences, would fill 1 GB with code. torch's library does not export the function that lowers this limit, and the
// environment variable that does so would slow down torch's own matmuls too. So oneDNN gets the first shapes of a
// process only; all others are left to the library that torch uses.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace symm_overlap::cpu {

constexpr size_t kMostOnednnShapes = 48;  // less than 64 MB of code

// Whether oneDNN may compute out = a @ b, or out += a @ b. The answer for a combination stays the same for as long as
// the process lives, and so do the bits of the product.
bool onednn_may_have(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out, bool add);

// For tests: counts from 0 again. What oneDNN has generated stays.
void forget_onednn_shapes();

}  // namespace symm_overlap::cpu
