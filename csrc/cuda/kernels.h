// Launches of the kernels in the .cu files beside this. Nothing here allocates, synchronises or checks its arguments,
// so that all of it can be captured in a CUDA graph; each returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/lane.h"

namespace symm_overlap::cuda {

// Loads the code of every kernel below on the current device. To be called before the first wait is launched (see
// load.h).
cudaError_t load_signal_kernels();
cudaError_t load_poison_kernel();
cudaError_t load_sleep_kernel();
cudaError_t load_clock_kernels();
cudaError_t load_reduce_kernels();
cudaError_t load_meeting_kernels();

// The peers that one launch tells, or waits for: different ranks, at least one. They travel as a kernel's argument.
constexpr int kMaxPeers = 128;
struct Peers {
  int count;
  int ranks[kMaxPeers];
};

// A signal to each of the peers, or a wait for each of them, on one channel.
cudaError_t launch_signal(const Lane& lane, const Call& call, const Peers& peers, int channel, cudaStream_t stream);
cudaError_t launch_wait(const Lane& lane, const Call& call, const Peers& peers, int channel, cudaStream_t stream);

// Whether the ranks meet in a barrier.
enum class Meet {
  kAlways,
  kInReplay,      // they do, and note that a graph uses the workspace
  kAfterReplays,  // if that is noted; then it is so no longer
};

// A signal to every other rank, then a wait for every other rank, on one channel; any world size.
cudaError_t launch_barrier(const Lane& lane, const Call& call, int channel, Meet when, cudaStream_t stream);

// Fails the lane, here and at every peer: their waits return, and outputs are poisoned.
cudaError_t launch_give_up(const Lane& lane, const Call& call, cudaStream_t stream);

// Dense memory to be poisoned.
struct Extent {
  void* data;
  size_t bytes;
};
constexpr int kMaxExtents = 16;
struct Extents {
  Extent items[kMaxExtents];
  int count;
};

// Some ranks of a lane.
constexpr int kMostRanks = 256;
struct Ranks {
  uint32_t words[kMostRanks / 32];
  void add(int rank) { words[rank / 32] |= 1u << (rank % 32); }
};

// Fills the extents with 0xFF bytes, a NaN in every floating-point dtype, if the lane has failed. A call whose signals
// were memory operations fails here if one of the ranks that it has `awaited` was in another call. `end`: the number by
// which the host is told that this launch has run, or 0.
cudaError_t launch_poison(const Lane& lane, const Call& call, const Ranks& awaited, const Extents& extents,
                          uint32_t end, cudaStream_t stream);

// Keeps the stream busy for `cycles` clocks of one multiprocessor, using no memory and next to no compute.
cudaError_t launch_sleep(int64_t cycles, cudaStream_t stream);

// See issue::Driver::pace. `link`: the GPU's time, in nanoseconds, until which the link is busy.
cudaError_t launch_pace(uint64_t* link, int64_t ns, cudaStream_t stream);

// Writes the GPU's time in nanoseconds.
cudaError_t launch_stamp(int64_t* time, cudaStream_t stream);

enum class Dtype { kFloat32, kFloat64, kBFloat16, kFloat16 };
constexpr int kMaxPartials = 256;  // they travel as an argument of the kernel, which has room for 4 KiB
struct Partials {
  const void* items[kMaxPartials];
  int count;
};

// out[i] = partials[0][i] + partials[1][i] + ... in that order, in float32 (float64 for kFloat64), divided by the count
// when `average`, rounded once. `copy` may be null; else it gets the same values. All arrays have `n` elements.
cudaError_t launch_reduce(const Partials& partials, Dtype dtype, bool average, void* out, void* copy, int64_t n,
                          cudaStream_t stream);

// A signal to every other rank and a wait for each of them, on one channel, and then `launch_reduce`; `out` may be
// empty. Then, unless `told` is -1, a signal to every other rank on channel `told`; else the end of the call, as by
// `launch_poison` for `out`, with its `end`.
cudaError_t launch_meet_and_sum(const Lane& lane, const Call& call, int channel, int told, const Partials& partials,
                                Dtype dtype, bool average, void* out, void* copy, int64_t n, uint32_t end,
                                cudaStream_t stream);

// A wait for every other rank, and then a copy of what each has `from` where it says, to its part of `out`; that of
// rank r is bytes [r * part, (r + 1) * part) of `total`, as far as there are so many. The own part is left as it is.
// Then the end of the call. All addresses, and `part`, are multiples of 16.
cudaError_t launch_await_and_gather(const Lane& lane, const Call& call, int channel, const Partials& from, void* out,
                                    int64_t part, int64_t total, uint32_t end, cudaStream_t stream);

}  // namespace symm_overlap::cuda
