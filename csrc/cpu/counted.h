// A tensor that counts the writes to another one.
#pragma once

#include <ATen/core/Tensor.h>

namespace symm_overlap::cpu {

// Returns `local`, in the same memory, with the version counter of `whole`: whoever keeps the result for a backward
// pass gets torch's error if `whole` has been written to meanwhile. Gradients flow to `local`. It is for a DTensor and
// this rank's part of it: torch counts a write to a DTensor at the DTensor only.
at::Tensor counting_writes_to(const at::Tensor& local, const at::Tensor& whole);

}  // namespace symm_overlap::cpu
