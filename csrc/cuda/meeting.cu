// Kernels in which the ranks meet and then read each other's memory, each in one launch: a sum of what all ranks have
// computed for this one, and the gathering of such sums. Where a plan has nothing to run meanwhile, a wait may hold
// multiprocessors, and one launch takes less time than a signal, a wait and a sum.
//
// Blocks do not wait for each other, so it does not matter in which order they run, or how many at a time. The first
// one to come tells the peers, since none may come before it; each waits for the signals of the peers itself; and the
// last one to have finished counts the epochs, which all had to read, and tells the peers or ends the call.
#include <type_traits>

#include "cuda/end_of_call.cuh"
#include "cuda/kernels.h"
#include "cuda/load.h"
#include "cuda/reduce.cuh"
#include "cuda/signal.cuh"

namespace symm_overlap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;  // up to 64 registers a thread, for loads in flight
// So many can have 256 KiB to 1 MiB under way, by one to four loads of 16 bytes a thread: what 450 GB/s need for half a
// microsecond to two. Other kernels find the rest of the multiprocessors free.
constexpr int kMostBlocks = 64;
constexpr int kBegun = 0, kEnded = 1;  // of ControlBlock::ticket

// By all threads of a block, as the functions below. Whether this block is the first one of the grid to come here.
__device__ inline bool first_block(const Lane& lane) {
  __shared__ bool first;
  if (threadIdx.x == 0) first = atomicAdd(lane.control + lane.block.ticket(kBegun), 1u) == 0;
  __syncthreads();
  return first;
}

// Whether all other blocks have come here before. A signal of this block then tells of what all blocks have written.
__device__ inline bool last_block(const Lane& lane) {
  __shared__ bool last;
  __syncthreads();  // all threads have written
  if (threadIdx.x == 0) {
    __threadfence_system();
    last = atomicAdd(lane.control + lane.block.ticket(kEnded), 1u) == gridDim.x - 1;
    __threadfence_system();
  }
  __syncthreads();
  return last;
}

__device__ inline void tell_all(const Lane& lane, const Call& call, int channel) {
  for (int peer = threadIdx.x; peer < lane.block.world; peer += blockDim.x) {
    if (peer != lane.rank) send_signal(lane, call, peer, channel);
  }
}

// The epochs are those that `count_all` will count to.
__device__ inline void await_all(const Lane& lane, const Call& call, int channel) {
  for (int peer = threadIdx.x; peer < lane.block.world; peer += blockDim.x) {
    if (peer == lane.rank) continue;
    await_epoch(lane, call, peer, channel, lane.control[lane.block.awaited(peer, channel)] + 1);
  }
  __syncthreads();  // what the peers did before is seen by all threads
}

// By the last block alone, as no other reads these words any more.
__device__ inline void count_all(const Lane& lane, int channel) {
  for (int peer = threadIdx.x; peer < lane.block.world; peer += blockDim.x) {
    if (peer != lane.rank) ++lane.control[lane.block.awaited(peer, channel)];
  }
  if (threadIdx.x == 0) lane.control[lane.block.ticket(kBegun)] = lane.control[lane.block.ticket(kEnded)] = 0;
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    meet_and_sum_kernel(Lane lane, Call call, int channel, int told, const __grid_constant__ Partials partials,
                        bool average, T* out, T* copy, int64_t n, uint32_t end) {
  if (first_block(lane)) tell_all(lane, call, channel);
  await_all(lane, call, channel);
  reduce_all<T, kWidth>(partials, average, out, copy, n);
  if (!last_block(lane)) return;
  count_all(lane, channel);
  if (told >= 0) return tell_all(lane, call, told);
  const Extent written{out, n * sizeof(T)};
  end_call(lane, call, &written, 1, end);
}

// Parts of so many bytes, of the ranks in their order; the last ones may be short or empty.
struct Shared {
  char* out;
  int64_t part;
  int64_t total;
};

// Some threads of several blocks share a copy: this is the one with number `first` of `stride`. All loads come before
// the first store, which might otherwise have to wait for one after another.
__device__ inline void copy_part(char* to, const char* from, int64_t bytes, int64_t first, int64_t stride) {
  constexpr int kLoads = 4;
  const int64_t vectors = bytes / kVectorBytes;
  uint4* const targets = reinterpret_cast<uint4*>(to);
  const uint4* const sources = reinterpret_cast<const uint4*>(from);
  for (int64_t i = first; i < vectors; i += kLoads * stride) {
    uint4 loaded[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (i + k * stride < vectors) loaded[k] = sources[i + k * stride];
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (i + k * stride < vectors) targets[i + k * stride] = loaded[k];
    }
  }
  for (int64_t i = vectors * kVectorBytes + first; i < bytes; i += stride) to[i] = from[i];
}

// The blocks are shared out among the peers, all of which are read at once.
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    await_and_gather_kernel(Lane lane, Call call, int channel, const __grid_constant__ Partials from, Shared shared,
                            uint32_t end) {
  await_all(lane, call, channel);
  const int others = lane.block.world - 1;
  const int peer = (lane.rank + 1 + static_cast<int>(blockIdx.x) % others) % lane.block.world;
  const int64_t begin = peer * shared.part;
  const int64_t left = begin < shared.total ? shared.total - begin : 0;
  const int64_t first = static_cast<int64_t>(blockIdx.x / others) * kThreads + threadIdx.x;
  copy_part(shared.out + begin, static_cast<const char*>(from.items[peer]), left < shared.part ? left : shared.part,
            first, static_cast<int64_t>(gridDim.x / others) * kThreads);
  if (!last_block(lane)) return;
  count_all(lane, channel);
  const Extent written{shared.out, static_cast<size_t>(shared.total)};
  end_call(lane, call, &written, 1, end);
}

// At least one: ranks meet where there is nothing to sum too.
unsigned blocks_for(int64_t items, int64_t most) {
  const int64_t needed = (items + kThreads - 1) / kThreads;
  const int64_t blocks = needed < most ? needed : most;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks);
}

template <typename T>
cudaError_t launch_sum(const Lane& lane, const Call& call, int channel, int told, const Partials& partials,
                       bool average, T* out, T* copy, int64_t n, uint32_t end, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool vectorised = all_aligned(partials, out, copy);
  const unsigned blocks = blocks_for(vectorised ? (n + kWidth - 1) / kWidth : n, kMostBlocks);
  const auto kernel = vectorised ? meet_and_sum_kernel<T, kWidth> : meet_and_sum_kernel<T, 1>;
  kernel<<<blocks, kThreads, 0, stream>>>(lane, call, channel, told, partials, average, out, copy, n, end);
  return cudaGetLastError();
}

}  // namespace

cudaError_t load_meeting_kernels() {
  const cudaError_t error = with_every_dtype([](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    return load_kernels({reinterpret_cast<const void*>(meet_and_sum_kernel<T, kVectorBytes / sizeof(T)>),
                         reinterpret_cast<const void*>(meet_and_sum_kernel<T, 1>)});
  });
  if (error != cudaSuccess) return error;
  return load_kernels({reinterpret_cast<const void*>(await_and_gather_kernel)});
}

cudaError_t launch_meet_and_sum(const Lane& lane, const Call& call, int channel, int told, const Partials& partials,
                                Dtype dtype, bool average, void* out, void* copy, int64_t n, uint32_t end,
                                cudaStream_t stream) {
  return with_dtype(dtype, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    return launch_sum(lane, call, channel, told, partials, average, static_cast<T*>(out), static_cast<T*>(copy), n, end,
                      stream);
  });
}

cudaError_t launch_await_and_gather(const Lane& lane, const Call& call, int channel, const Partials& from, void* out,
                                    int64_t part, int64_t total, uint32_t end, cudaStream_t stream) {
  if (part % kVectorBytes != 0 || !all_aligned(from, out, nullptr)) return cudaErrorMisalignedAddress;
  const Shared shared{static_cast<char*>(out), part, total};
  const int others = lane.block.world - 1;
  const unsigned blocks = others * blocks_for(part / kVectorBytes, kMostBlocks / others);
  await_and_gather_kernel<<<blocks, kThreads, 0, stream>>>(lane, call, channel, from, shared, end);
  return cudaGetLastError();
}

}  // namespace symm_overlap::cuda
