// Large pages for large private memory: a fresh tensor of tens of MiB otherwise costs more in page faults than in
// copies.
#pragma once

#include <cstddef>

namespace symm_overlap::cpu {

// A hint for the whole pages of these bytes; without effect where the system has large pages off, or always on.
void prefer_huge_pages(void* data, size_t bytes);

}  // namespace symm_overlap::cpu
