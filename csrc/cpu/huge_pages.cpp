#include "cpu/huge_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace symm_overlap::cpu {

void prefer_huge_pages(void* data, size_t bytes) {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (begin < end) {
    (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
}

}  // namespace symm_overlap::cpu
