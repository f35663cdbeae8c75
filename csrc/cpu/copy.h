// Copies of shards.
#pragma once

#include <ATen/core/Tensor.h>

namespace symm_overlap::cpu {

// target.copy_(source). Where both are large and lie together in memory, past the caches: nobody reads the copy soon,
// and to read every line of the target before it is overwritten takes a third of what the memory gives.
void copy(at::Tensor target, const at::Tensor& source);

}  // namespace symm_overlap::cpu
