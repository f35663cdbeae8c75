// Memory for large outputs, kept for the next one: a fresh tensor of tens of MiB otherwise costs more in page faults
// than in copies.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace symm_overlap::cpu {

// An uninitialised contiguous CPU tensor. Its memory, when freed, is given to the next one of the same size; meanwhile
// the system may take its pages back whenever it is short of them.
at::Tensor large_output(at::IntArrayRef shape, at::ScalarType dtype);

// Bytes of freed memory that wait for a next tensor.
size_t kept_output_bytes();

// Gives them back to the system now.
void release_kept_outputs();

}  // namespace symm_overlap::cpu
