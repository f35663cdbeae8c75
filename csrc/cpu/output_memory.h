// Memory for large outputs, which is kept for later outputs. Otherwise the page faults of a fresh tensor of tens of MiB
// would cost more than the copies into it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace symm_overlap::cpu {

// From this size in bytes on, malloc is likely to use fresh pages for a tensor. Each of them faults at its first write.
constexpr size_t kLarge = size_t{8} << 20;

// Returns an uninitialised contiguous CPU tensor with the dtype of `like`. When a large tensor is freed, its memory is
// kept for the next tensor of the same size. Until then, the system may reclaim the pages whenever memory is short.
at::Tensor new_output(const at::Tensor& like, at::IntArrayRef shape);

// The bytes of freed memory that are kept for later tensors.
size_t kept_output_bytes();

// Releases this memory to the system now.
void release_kept_outputs();

}  // namespace symm_overlap::cpu
