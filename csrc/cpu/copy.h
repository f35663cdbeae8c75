// Copies of shards.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace symm_overlap::cpu {

// target.copy_(source), neither of them a lazily negated view. Where both lie together in memory it is a plain copy of
// bytes, and that of a large one goes past the caches: a third of what an ordinary copy moves is the target's old
// lines, read before they are overwritten.
void copy(const at::Tensor& target, const at::Tensor& source);

// The same for bytes that lie together.
void copy_bytes(char* target, const char* source, int64_t bytes);

}  // namespace symm_overlap::cpu
