// Replaces csrc/cuda/system_memory.cuh when a test compiles the signal protocol for the host. It has the same
// functions on the same words, implemented with the CPU's atomics.
#pragma once

#include <sched.h>
#include <time.h>

#include <cstdint>

namespace symm_overlap::cuda {

inline uint32_t load_acquire_system(const uint32_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

inline uint32_t load_relaxed_system(const uint32_t* word) {
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}

inline uint64_t load_relaxed_system(const uint64_t* word) {
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}

inline void store_relaxed_system(uint64_t* word, uint64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

inline void store_release_system(uint32_t* word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

inline bool first_to_mark(uint32_t* word) {
  uint32_t clear = 0;
  return __atomic_compare_exchange_n(word, &clear, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

inline void pause(uint32_t /*nanoseconds*/) {
  sched_yield();  // there may be more threads than cores, and the awaited thread may need this core
}

inline int64_t global_nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

}  // namespace symm_overlap::cuda
