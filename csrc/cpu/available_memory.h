// How much memory this process can still take before the kernel ends it, or another process.
#pragma once

#include <cstddef>

namespace symm_overlap::cpu {

// The smallest of what the machine has and what each memory cgroup of this process allows, in bytes. Memory that files
// are cached in counts as available, as the kernel gives it back. SIZE_MAX if nothing is known.
size_t available_memory();

}  // namespace symm_overlap::cpu
