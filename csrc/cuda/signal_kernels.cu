// The kernels of signals, waits and barriers, and the kernel by which a host gives up. Each kernel is tiny. It costs a
// launch, and one line of memory to poll.
#include "cuda/kernels.h"
#include "cuda/load.h"
#include "cuda/signal.cuh"

namespace symm_overlap::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr int kBlocksOnOneProcessor = 2;  // blocks of kMaxThreads threads: that leaves 32 registers for each thread
constexpr int kSmallBlocks = kMaxThreads / kMaxPeers * kBlocksOnOneProcessor;  // the same, for fewer threads

// One thread for each peer, in both kernels.
__global__ void signal_kernel(Lane lane, Call call, Peers peers, int channel) {
  if (static_cast<int>(threadIdx.x) < peers.count) send_signal(lane, call, peers.ranks[threadIdx.x], channel);
}

__global__ void __launch_bounds__(kMaxPeers, kSmallBlocks) wait_kernel(Lane lane, Call call, Peers peers, int channel) {
  if (static_cast<int>(threadIdx.x) < peers.count) await_signal(lane, call, peers.ranks[threadIdx.x], channel);
}

// One thread for each write.
__global__ void write_kernel(Writes writes) {
  const Write write = writes.items[threadIdx.x];
  if (write.wide) store_relaxed_system(reinterpret_cast<uint64_t*>(write.address), write.value);
  __syncthreads();  // all wide writes happen before every release below
  if (!write.wide) store_release_system(reinterpret_cast<uint32_t*>(write.address), static_cast<uint32_t>(write.value));
}

// One thread for each peer. If there are more ranks than threads, each thread serves several peers. The kernel uses as
// few registers as a wait, because it may run beside a matmul.
__global__ void __launch_bounds__(kMaxThreads, kBlocksOnOneProcessor)
    barrier_kernel(Lane lane, Call call, int channel, Meet when) {
  uint32_t* replayed = lane.control + lane.block.replayed();
  if (when == Meet::kAfterReplays && *replayed == 0) return;
  for (int peer = threadIdx.x; peer < lane.block.world; peer += blockDim.x) {
    if (peer != lane.rank) send_signal(lane, call, peer, channel);
  }
  __syncthreads();  // all signals are sent before any thread waits, and all threads have read `replayed`
  if (threadIdx.x == 0 && when != Meet::kAlways) *replayed = when == Meet::kInReplay;
  for (int peer = threadIdx.x; peer < lane.block.world; peer += blockDim.x) {
    if (peer != lane.rank) await_signal(lane, call, peer, channel);
  }
}

__global__ void give_up_kernel(Lane lane, Call call) {
  give_up(lane, call);
}

}  // namespace

cudaError_t load_signal_kernels() {
  return load_kernels({reinterpret_cast<const void*>(signal_kernel), reinterpret_cast<const void*>(wait_kernel),
                       reinterpret_cast<const void*>(write_kernel), reinterpret_cast<const void*>(barrier_kernel),
                       reinterpret_cast<const void*>(give_up_kernel)});
}

cudaError_t launch_signal(const Lane& lane, const Call& call, const Peers& peers, int channel, cudaStream_t stream) {
  signal_kernel<<<1, peers.count, 0, stream>>>(lane, call, peers, channel);
  return cudaGetLastError();
}

cudaError_t launch_wait(const Lane& lane, const Call& call, const Peers& peers, int channel, cudaStream_t stream) {
  wait_kernel<<<1, peers.count, 0, stream>>>(lane, call, peers, channel);
  return cudaGetLastError();
}

cudaError_t launch_writes(const Writes& writes, cudaStream_t stream) {
  write_kernel<<<1, writes.count, 0, stream>>>(writes);
  return cudaGetLastError();
}

cudaError_t launch_barrier(const Lane& lane, const Call& call, int channel, Meet when, cudaStream_t stream) {
  const int rounded_up = (lane.block.world + kWarp - 1) / kWarp * kWarp;
  const int threads = rounded_up < kMaxThreads ? rounded_up : kMaxThreads;
  barrier_kernel<<<1, threads, 0, stream>>>(lane, call, channel, when);
  return cudaGetLastError();
}

cudaError_t launch_give_up(const Lane& lane, const Call& call, cudaStream_t stream) {
  give_up_kernel<<<1, 1, 0, stream>>>(lane, call);
  return cudaGetLastError();
}

}  // namespace symm_overlap::cuda
