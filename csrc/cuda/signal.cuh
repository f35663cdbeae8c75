// Epoch signals between GPUs: the device functions that every kernel with a signal or a wait is made of.
//
// Order. A signal is a release at system scope and a wait an acquire, so whatever came before the signal, in its kernel
// or earlier in its stream (copies too), is seen by whatever comes after the wait. Release is cumulative: no other
// fence is needed.
//
// Failure. A wait that passes its deadline neither traps, which would lose the CUDA context, nor goes on in silence. It
// first tells every peer, then marks its own lane as failed and writes one record for the host. Later waits of the lane
// return at once. As the peers are told before this rank can do anything that follows from the failed wait, a peer that
// is handed data computed from garbage finds its own lane failed before its call ends, and poisons its output too. The
// same happens when the host fails in the middle of a call, and will not launch what the peers wait for.
#pragma once

#include "cuda/lane.h"
#include "cuda/system_memory.cuh"

namespace symm_overlap::cuda {

__device__ inline uint32_t* block_of(const Lane& lane, int rank) {
  return reinterpret_cast<uint32_t*>(lane.peers[rank]);
}

__device__ inline bool lane_failed(const Lane& lane) {
  return load_acquire_system(lane.control + lane.block.failed()) != 0;
}

// 0, or 1 + the rank where a failure began that a peer told this rank about.
__device__ inline uint32_t lane_told(const Lane& lane) {
  return load_acquire_system(lane.control + lane.block.told());
}

// The next epoch for `peer` on `channel`. One thread, and always the same stream for one (peer, channel).
__device__ inline void send_signal(const Lane& lane, int peer, int channel) {
  uint32_t* sent = lane.control + lane.block.sent(peer, channel);
  const uint32_t epoch = *sent + 1;
  *sent = epoch;
  store_release_system(block_of(lane, peer) + lane.block.slot(lane.rank, channel), epoch);
}

// Tells the peers, then marks the lane as failed: whoever sees the mark finds the peers told. Only the first to mark it
// writes the record, in which `peer` is what common/failure_record.h says for this reason.
__device__ inline void fail(const Lane& lane, const Call& call, FailureReason reason, uint32_t peer,
                            uint32_t channel = 0, uint32_t expected = 0, uint32_t found = 0) {
  const int origin = reason == kTold ? static_cast<int>(peer) : lane.rank;
  for (int other = 0; other < lane.block.world; ++other) {
    // Not the rank where it began: that one knows, and knows better.
    if (other != lane.rank && other != origin) {
      store_release_system(block_of(lane, other) + lane.block.told(), static_cast<uint32_t>(origin) + 1);
    }
  }
  if (!first_to_mark(lane.control + lane.block.failed())) return;
  volatile FailureRecord* record = lane.record;
  record->op = call.op;
  record->call = call.number;
  record->peer = peer;
  record->channel = channel;
  record->expected = expected;
  record->found = found;
  store_release_system(&lane.record->reason, reason);
}

// When the host cannot go on with a call. On a lane that has failed the peers are told already, and where that began.
__device__ inline void give_up(const Lane& lane, const Call& call) {
  if (!lane_failed(lane)) fail(lane, call, kGaveUp, static_cast<uint32_t>(lane.rank));
}

// At the end of a call: whether it failed, here or at a peer that has said so.
__device__ inline bool call_failed(const Lane& lane, const Call& call) {
  if (lane_failed(lane)) return true;
  const uint32_t told = lane_told(lane);
  if (told == 0) return false;
  // No wait of this rank noticed. Without a record, the host would not learn why its output is NaN.
  fail(lane, call, kTold, told - 1);
  return true;
}

// Waits for the next epoch of `peer` on `channel`. One thread, and always the same stream for one (peer, channel).
__device__ inline void await_signal(const Lane& lane, const Call& call, int peer, int channel) {
  // Counted up even when the wait fails: the n-th wait stands for the n-th signal whatever happens.
  uint32_t* awaited = lane.control + lane.block.awaited(peer, channel);
  const uint32_t expected = *awaited + 1;
  *awaited = expected;

  // Polling one word is the fast path; failure words and clock are looked at on the first miss, and then now and then.
  constexpr uint32_t kPollsBetweenChecks = 64;
  const uint32_t* slot = lane.control + lane.block.slot(peer, channel);
  const int64_t start = global_nanoseconds();
  for (uint32_t poll = 0;; ++poll) {
    const uint32_t found = load_acquire_system(slot);
    if (epoch_reached(found, expected)) return;
    if (poll % kPollsBetweenChecks != 0) continue;
    if (lane_failed(lane)) return;
    if (const uint32_t told = lane_told(lane)) {
      fail(lane, call, kTold, told - 1);
      return;
    }
    if (global_nanoseconds() - start < static_cast<int64_t>(call.timeout_ns)) continue;
    fail(lane, call, kTimedOut, static_cast<uint32_t>(peer), channel, expected, found);
    return;
  }
}

}  // namespace symm_overlap::cuda
