// Definitions with which g++ compiles the sources of kernels: CUDA's keywords for kernels, and the functions that
// kernels call. This header is included before each source.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <tuple>
#include <type_traits>

#include "fibers.h"
#include "runtime/kernels.h"

#undef __device__
#undef __global__
#undef __grid_constant__
#undef __launch_bounds__
#undef __shared__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local  // a block is one thread of the host

#define threadIdx host_gpu::thread_index
#define blockIdx host_gpu::block_index
#define blockDim host_gpu::block_size
#define gridDim host_gpu::grid_size

inline void __syncthreads() {
  host_gpu::block_barrier();
}

// A clock of two gigahertz.
inline long long clock64() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  host_gpu::pause_thread(1000);
  return 2 * std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

template <typename Word>
Word atomicAdd(Word* word, std::type_identity_t<Word> value) {
  return std::atomic_ref(*word).fetch_add(value);
}

inline void __threadfence_system() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

inline unsigned long long atomicMax(unsigned long long* word, unsigned long long value) {
  std::atomic_ref shared(*word);
  unsigned long long before = shared.load();
  while (before < value && !shared.compare_exchange_weak(before, value)) {
  }
  return before;
}

namespace host_gpu {

template <auto kKernel>
struct HostForm;

// Creates the work of one launch of a kernel. The arguments are copied, as in a launch on a GPU.
template <typename... Arguments, void (*kKernel)(Arguments...)>
struct HostForm<kKernel> {
  using Copies = std::tuple<std::decay_t<Arguments>...>;

  static std::function<void()> launch(unsigned blocks, unsigned threads, void** arguments) {
    auto copies = std::make_shared<Copies>(copy(arguments, std::index_sequence_for<Arguments...>()));
    return [=] { run_grid(blocks, threads, [&] { std::apply(kKernel, *copies); }); };
  }

 private:
  template <size_t... kIndices>
  static Copies copy(void** arguments, std::index_sequence<kIndices...>) {
    return {*static_cast<std::decay_t<Arguments>*>(arguments[kIndices])...};
  }
};

struct Registration {
  Registration(const char* scope, const char* name, Launch launch) { host_gpu_register(scope, name, launch); }
};

}  // namespace host_gpu
