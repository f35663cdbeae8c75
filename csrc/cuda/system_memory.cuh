// What the signal protocol needs of the GPU: words of memory that the host and other GPUs see too, and a clock.
#pragma once

#include <cstdint>

namespace symm_overlap::cuda {

__device__ inline uint32_t load_acquire_system(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Only the word itself, without what its writer did before: for polling, and for words that a signal releases.
__device__ inline uint32_t load_relaxed_system(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline uint64_t load_relaxed_system(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline void store_relaxed_system(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}

__device__ inline void store_release_system(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
}

// Turns 0 into 1, with release order: true for the one caller who did. Only for a word of this GPU's own memory:
// atomics do not cross every bus.
__device__ inline bool first_to_mark(uint32_t* word) {
  __threadfence_system();
  return atomicCAS(word, 0u, 1u) == 0u;
}

__device__ inline void pause(uint32_t nanoseconds) {
  __nanosleep(nanoseconds);
}

__device__ inline int64_t global_nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return static_cast<int64_t>(now);
}

}  // namespace symm_overlap::cuda
