// Copies of shards.
#pragma once

#include <ATen/core/Tensor.h>

namespace symm_overlap::cpu {

// target.copy_(source), neither of them a lazily negated view. Where both lie together in memory it is a plain copy of
// bytes, and that of a large one goes past the caches: a third of what an ordinary copy moves is the target's old
// lines, read before they are overwritten.
void copy(const at::Tensor& target, const at::Tensor& source);

}  // namespace symm_overlap::cpu
