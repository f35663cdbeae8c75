// Kernels in which the ranks meet and then read each other's memory, each in one launch. One sums the partial results
// that all ranks have computed for this rank. The other gathers such sums. If a plan has no other work to run
// meanwhile, a wait may occupy multiprocessors, and one launch takes less time than a signal, a wait and a sum.
//
// Blocks do not wait for each other, so they may run in any order, and any number at a time. The first block to start,
// whichever it is, signals the peers. A fixed block could not do this: it might start only after blocks that already
// wait for the peers. Each block waits for the signals of the peers itself. The last block to finish counts the epochs,
// because all blocks have to read the old counts. It then signals the peers or ends the call.

#include "cuda/end_of_call.cuh"
#include "cuda/kernels.h"
#include "cuda/load.h"
#include "cuda/reduce.cuh"
#include "cuda/signal.cuh"

namespace symm_overlap::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;  // up to 64 registers a thread, for loads in flight
// This many blocks can have 256 KiB to 1 MiB in flight, with one to four loads of 16 bytes a thread. A link of 450 GB/s
// needs this much in flight if a load takes half a microsecond to two. The rest of the multiprocessors stays free for
// other kernels.
constexpr int kMostBlocks = 64;
constexpr int kBegun = 0, kEnded = 1;  // indices for ControlBlock::ticket

// To be called by all threads of a block, as all functions below. Returns whether this block of the grid is the first
// to call it.
__device__ inline bool first_block(const Lane& lane) {
  __shared__ bool first;
  if (threadIdx.x == 0) first = atomicAdd(lane.control + lane.block.ticket(kBegun), 1u) == 0;
  __syncthreads();
  return first;
}

// Returns whether all other blocks have called this before. A signal of this block then publishes what all blocks have
// written.
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

// Waits for the epochs that `count_all` will count to.
__device__ inline void await_all(const Lane& lane, const Call& call, int channel) {
  for (int peer = threadIdx.x; peer < lane.block.world; peer += blockDim.x) {
    if (peer == lane.rank) continue;
    await_epoch(lane, call, peer, channel, lane.control[lane.block.awaited(peer, channel)] + 1);
  }
  __syncthreads();  // all threads see what the peers did before
}

// To be called by the last block only: no other block reads these words any more.
__device__ inline void count_all(const Lane& lane, int channel) {
  for (int peer = threadIdx.x; peer < lane.block.world; peer += blockDim.x) {
    if (peer != lane.rank) ++lane.control[lane.block.awaited(peer, channel)];
  }
  if (threadIdx.x == 0) lane.control[lane.block.ticket(kBegun)] = lane.control[lane.block.ticket(kEnded)] = 0;
}

template <typename T, typename Out, int kWidth>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    meet_and_sum_kernel(Lane lane, Call call, int channel, int done_channel, const __grid_constant__ Partials partials,
                        bool average, Out* out, Out* copy, int64_t n, uint32_t end) {
  if (first_block(lane)) tell_all(lane, call, channel);
  await_all(lane, call, channel);
  reduce_all<T, Out, kWidth>(partials, average, out, copy, n);
  if (!last_block(lane)) return;
  count_all(lane, channel);
  if (done_channel >= 0) return tell_all(lane, call, done_channel);
  const Extent written{out, n * sizeof(Out)};
  end_call(lane, call, &written, 1, end);
}

// The gathered memory: parts of `part` bytes each, in rank order. The last parts may be shorter or empty.
struct Shared {
  char* out;
  int64_t part;
  int64_t total;
};

// Several threads of several blocks share a copy. This is the thread with number `first` of `stride`. All loads come
// before the first store. Otherwise each store might have to wait for its load, one after another.
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

// The blocks are divided among the peers, so that all peers are read at the same time.
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

// Returns at least one: ranks also meet if there is nothing to sum.
unsigned blocks_for(int64_t items, int64_t most) {
  const int64_t needed = (items + kThreads - 1) / kThreads;
  const int64_t blocks = needed < most ? needed : most;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks);
}

template <typename T, typename Out>
cudaError_t launch_sum(const Lane& lane, const Call& call, int channel, int done_channel, const Partials& partials,
                       bool average, Out* out, Out* copy, int64_t n, uint32_t end, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool vectorised = all_aligned(partials, out, copy);
  const unsigned blocks = blocks_for(vectorised ? (n + kWidth - 1) / kWidth : n, kMostBlocks);
  const auto kernel = vectorised ? meet_and_sum_kernel<T, Out, kWidth> : meet_and_sum_kernel<T, Out, 1>;
  kernel<<<blocks, kThreads, 0, stream>>>(lane, call, channel, done_channel, partials, average, out, copy, n, end);
  return cudaGetLastError();
}

}  // namespace

cudaError_t load_meeting_kernels() {
  const cudaError_t error = with_all_dtypes([](auto types) {
    using T = typename decltype(types)::Partial;
    using Out = typename decltype(types)::Output;
    return load_kernels({reinterpret_cast<const void*>(meet_and_sum_kernel<T, Out, kVectorBytes / sizeof(T)>),
                         reinterpret_cast<const void*>(meet_and_sum_kernel<T, Out, 1>)});
  });
  if (error != cudaSuccess) return error;
  return load_kernels({reinterpret_cast<const void*>(await_and_gather_kernel)});
}

cudaError_t launch_meet_and_sum(const Lane& lane, const Call& call, int channel, int done_channel,
                                const Partials& partials, Dtypes dtypes, bool average, void* out, void* copy, int64_t n,
                                uint32_t end, cudaStream_t stream) {
  return with_dtypes(dtypes, [&](auto types) {
    using T = typename decltype(types)::Partial;
    using Out = typename decltype(types)::Output;
    return launch_sum<T>(lane, call, channel, done_channel, partials, average, static_cast<Out*>(out),
                         static_cast<Out*>(copy), n, end, stream);
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
