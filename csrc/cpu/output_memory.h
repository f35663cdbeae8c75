// Memory for large outputs, kept for the next one: a fresh tensor of tens of MiB otherwise costs more in page faults
// than in copies.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace symm_overlap::cpu {

// From so many bytes on malloc is likely to take fresh pages for a tensor, each of which is a fault at its first write.
constexpr size_t kLarge = size_t{8} << 20;

// An uninitialised contiguous CPU tensor with the dtype of `like`. The memory of a large one, when freed, is given to
// the next one of the same size; meanwhile the system may take its pages back whenever it is short of them.
at::Tensor new_output(const at::Tensor& like, at::IntArrayRef shape);

// Bytes of freed memory that wait for a next tensor.
size_t kept_output_bytes();

// Gives them back to the system now.
void release_kept_outputs();

}  // namespace symm_overlap::cpu
