// Replaces csrc/cuda/system_memory.cuh, which is written in PTX, by the same functions for the memory of a host.
#pragma once

#include <cstdint>

#include "device.h"

namespace symm_overlap::cuda {

template <typename Word>
std::atomic_ref<Word> shared(const Word* word) {
  return std::atomic_ref<Word>(*const_cast<Word*>(word));
}

inline uint32_t load_acquire_system(const uint32_t* word) {
  return shared(word).load(std::memory_order_acquire);
}

inline uint32_t load_relaxed_system(const uint32_t* word) {
  return shared(word).load(std::memory_order_relaxed);
}

inline uint64_t load_relaxed_system(const uint64_t* word) {
  return shared(word).load(std::memory_order_relaxed);
}

inline void store_relaxed_system(uint64_t* word, uint64_t value) {
  shared(word).store(value, std::memory_order_relaxed);
}

inline void store_release_system(uint32_t* word, uint32_t value) {
  shared(word).store(value, std::memory_order_release);
}

inline bool first_to_mark(uint32_t* word) {
  uint32_t clear = 0;
  return shared(word).compare_exchange_strong(clear, 1);
}

// Pauses at least as long as the other threads of the host need to make progress.
inline void pause(uint32_t nanoseconds) {
  host_gpu::pause_thread(nanoseconds < 1000 ? 1000 : nanoseconds);
}

inline int64_t global_nanoseconds() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace symm_overlap::cuda
