// Copies of shards.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace symm_overlap::cpu {

// target.copy_(source). Neither may be a lazily negated view. If both are contiguous, the bytes are copied, and a large
// copy bypasses the caches for its target. An ordinary copy also reads the target's old lines before it overwrites
// them, which is a third of the data that it moves.
void copy(const at::Tensor& target, const at::Tensor& source);

// The same for contiguous bytes.
void copy_bytes(char* target, const char* source, int64_t bytes);

}  // namespace symm_overlap::cpu
