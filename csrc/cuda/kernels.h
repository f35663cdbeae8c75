// Launches of the kernels in the .cu files of this folder. No function here allocates, synchronises or checks its
// arguments, so all launches can be captured in a CUDA graph. Each function returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/lane.h"

namespace symm_overlap::cuda {

// These functions load the code of every kernel below on the current device. They must be called before the first wait
// is launched (see load.h).
cudaError_t load_signal_kernels();
cudaError_t load_poison_kernel();
cudaError_t load_sleep_kernel();
cudaError_t load_clock_kernels();
cudaError_t load_reduce_kernels();
cudaError_t load_meeting_kernels();
cudaError_t load_flag_kernels();

// The peers that one launch signals or waits for: at least one, all different. Passed as a kernel argument.
constexpr int kMaxPeers = 128;
struct Peers {
  int count;
  int ranks[kMaxPeers];
};

// Launches a signal to each of the peers, or a wait for each of them, on one channel.
cudaError_t launch_signal(const Lane& lane, const Call& call, const Peers& peers, int channel, cudaStream_t stream);
cudaError_t launch_wait(const Lane& lane, const Call& call, const Peers& peers, int channel, cudaStream_t stream);

// When the ranks meet in a barrier.
enum class Meet {
  kAlways,
  kInReplay,      // always, and the barrier records that a graph uses the workspace
  kAfterReplays,  // only if that is recorded; the record is then cleared
};

// Writes that one launch carries out: at least one, to different words. Passed as a kernel argument.
struct Write {
  uint64_t address;
  uint64_t value;
  bool wide;  // of 64 bits instead of 32
};
constexpr int kMaxWrites = 128;
struct Writes {
  int count;
  Write items[kMaxWrites];
};
static_assert(sizeof(Writes) <= 4096, "kernel arguments are limited to 4 KiB");

// Launches the writes: first all wide ones, then the others. Who sees one of the others also sees the wide ones, and
// everything that the stream did before.
cudaError_t launch_writes(const Writes& writes, cudaStream_t stream);

// Launches a signal to every other rank, then a wait for every other rank, on one channel. For any world size.
cudaError_t launch_barrier(const Lane& lane, const Call& call, int channel, Meet when, cudaStream_t stream);

// Marks the lane as failed, on this rank and on every peer: waits return, and outputs are poisoned.
cudaError_t launch_give_up(const Lane& lane, const Call& call, cudaStream_t stream);

// Dense memory to poison.
struct Extent {
  void* data;
  size_t bytes;
};
constexpr int kMaxExtents = 16;
struct Extents {
  Extent items[kMaxExtents];
  int count;
};

// A set of ranks of a lane.
constexpr int kMostRanks = 256;
struct Ranks {
  uint32_t words[kMostRanks / 32];
  void add(int rank) { words[rank / 32] |= 1u << (rank % 32); }
};

// Flags in this GPU's own memory, between a fused kernel and copies (symm_overlap/kernels/device.py). A flag is the
// first word of its line. The status line has the same size; its first word is 0 while nothing has failed.
constexpr int kFlagLine = 32;
constexpr int kFlagEpoch = 4;    // the word of the status line that is the epoch of the call
constexpr int kStatusWords = 5;  // of the status line that are copied to the record
constexpr int kFlagCaller = 5;   // the word of the record that identifies the call
constexpr int kRecordWords = 6;
constexpr uint32_t kFlagsAbandoned = 2;  // the status after the host has given up

// The flags that a call has used, for its end.
struct UsedFlags {
  uint32_t* status;  // null: the call has used none
  uint32_t* record;  // pinned; its first word is 0 until a call has failed. It keeps the first failure
  uint32_t caller;   // identifies the call in the record
  uint32_t ended;    // 1 if the next call is to have the next epoch
};

// Each of these launches one small kernel, which raises a flag or waits for a flag.
cudaError_t launch_raise_flag(uint32_t* flag, const uint32_t* status, cudaStream_t stream);
cudaError_t launch_await_flag(const uint32_t* flag, const uint32_t* status, cudaStream_t stream);
// Ends every wait for a flag, now and later.
cudaError_t launch_give_up_flags(uint32_t* status, cudaStream_t stream);

// Fills the extents with 0xFF bytes, a NaN in every floating-point dtype, if the lane or the flags have failed. A call
// whose signals were memory operations fails here if one of the ranks that it has `awaited` was in another call. `end`:
// the number that is written to the failure record once this launch has run, so that the host knows; 0: none.
cudaError_t launch_poison(const Lane& lane, const Call& call, const Ranks& awaited, const Extents& extents,
                          const UsedFlags& flags, uint32_t end, cudaStream_t stream);

// Keeps the stream busy for `cycles` clocks of one multiprocessor. Uses no memory and almost no compute.
cudaError_t launch_sleep(int64_t cycles, cudaStream_t stream);

// See issue::Driver::pace. `link`: the GPU's time, in nanoseconds, until which the link is busy.
cudaError_t launch_pace(uint64_t* link, int64_t ns, cudaStream_t stream);

// Writes the GPU's time in nanoseconds.
cudaError_t launch_stamp(int64_t* time, cudaStream_t stream);

enum class Dtype { kFloat32, kFloat64, kBFloat16, kFloat16 };
struct Dtypes {
  Dtype partials;
  Dtype out;  // the same, or kFloat32 for sums of kBFloat16 or kFloat16
};
constexpr int kMaxPartials = 256;  // passed as a kernel argument, limited to 4 KiB
struct Partials {
  const void* items[kMaxPartials];
  int count;
};

// out[i] = partials[0][i] + partials[1][i] + ... in that order, in float32 (float64 for kFloat64), divided by the count
// if `average`, and rounded once, to the dtype of `out`. If `copy` is not null, it gets the same values. All arrays
// have `n` elements.
cudaError_t launch_reduce(const Partials& partials, Dtypes dtypes, bool average, void* out, void* copy, int64_t n,
                          cudaStream_t stream);

// In one launch: a signal to every other rank and a wait for each of them, on one channel, and then the sum of
// `launch_reduce`; `out` may be empty. If `done_channel` is not -1, a signal to every other rank on `done_channel`
// follows. If it is -1, the call ends as in `launch_poison`: `out` is filled if the lane has failed, and `end` is
// written.
cudaError_t launch_meet_and_sum(const Lane& lane, const Call& call, int channel, int done_channel,
                                const Partials& partials, Dtypes dtypes, bool average, void* out, void* copy, int64_t n,
                                uint32_t end, cudaStream_t stream);

// In one launch: a wait for every other rank, a copy of each rank's data at its address in `from` to its part of `out`,
// and the end of the call. The part of rank r is bytes [r * part, (r + 1) * part), cut off at `total`. This rank's own
// part is not changed. All addresses, and `part`, must be multiples of 16.
cudaError_t launch_await_and_gather(const Lane& lane, const Call& call, int channel, const Partials& from, void* out,
                                    int64_t part, int64_t total, uint32_t end, cudaStream_t stream);

}  // namespace symm_overlap::cuda
