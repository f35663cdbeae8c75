// The GPU features that the signal protocol needs: words of memory that the host and other GPUs also see, and a clock.
#pragma once

#include <cstdint>

namespace symm_overlap::cuda {

__device__ inline uint32_t load_acquire_system(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Loads only the word itself, without what its writer did before. For polling, and for words that a signal releases.
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

// Turns 0 into 1, with release order. Returns true to the one caller that did so. Only for a word in this GPU's own
// memory: atomics do not work across every bus.
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
