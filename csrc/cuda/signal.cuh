// Epoch signals between GPUs: the device functions that every kernel with a signal or a wait is made of.
//
// Order. A signal is a release at system scope and a wait an acquire, so whatever came before the signal, in its kernel
// or earlier in its stream (copies too), is seen by whatever comes after the wait. Release is cumulative: no other
// fence is needed.
//
// Failure. A wait that passes its deadline neither traps, which would lose the CUDA context, nor goes on in silence. It
// first tells every peer, then marks its own lane as failed and writes one record for the host. Later waits of the lane
// return at once. As the peers are told before this rank can do anything that follows from the failed wait, a peer that
// is handed data computed from garbage finds its own lane failed before its call ends, and poisons its output too.
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

// Marks the lane as failed; only the first to do so writes the record. Whoever sees the mark finds the peers told.
// `origin` is the rank whose wait passed its deadline.
__device__ inline void mark_failed(const Lane& lane, const Call& call, uint32_t origin, uint32_t peer, uint32_t channel,
                                   uint32_t expected, uint32_t found) {
  if (!first_to_mark(lane.control + lane.block.failed())) return;
  volatile FailureRecord* record = lane.record;
  record->op = call.op;
  record->call = call.number;
  record->peer = peer;
  record->channel = channel;
  record->expected = expected;
  record->found = found;
  store_release_system(&lane.record->reason, origin == static_cast<uint32_t>(lane.rank) ? kTimedOut : kTold);
}

// Not the rank where it began: that one knows, and knows better.
__device__ inline void tell_peers(const Lane& lane, uint32_t origin) {
  for (int peer = 0; peer < lane.block.world; ++peer) {
    if (peer != lane.rank && peer != static_cast<int>(origin))
      store_release_system(block_of(lane, peer) + lane.block.told(), origin + 1);
  }
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
    const uint32_t told = lane_told(lane);
    const bool late = global_nanoseconds() - start >= static_cast<int64_t>(call.timeout_ns);
    if (told == 0 && !late) continue;
    const uint32_t origin = told != 0 ? told - 1 : static_cast<uint32_t>(lane.rank);
    tell_peers(lane, origin);
    mark_failed(lane, call, origin, told != 0 ? origin : static_cast<uint32_t>(peer), channel, expected, found);
    return;
  }
}

}  // namespace symm_overlap::cuda
