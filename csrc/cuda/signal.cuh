// Epoch signals between GPUs: the device functions for every kernel that signals or waits.
//
// Order. A signal is a release at system scope, and a wait is an acquire. So everything that came before the signal, in
// its kernel or earlier in its stream (copies too), is seen by everything that comes after the wait. Release is
// cumulative: no other fence is needed.
//
// Calls. A signal announces the call that its rank is in, in a word that is stored before the signal. So a wait that
// has acquired the signal can check whether the peer is in the same call. If it is not, the peer's data is not what
// this rank expects.
//
// Failure. A wait that passes its deadline does not trap, which would lose the CUDA context, and does not go on
// silently. It first notifies every peer, then marks its own lane as failed and writes one record for the host. Later
// waits of the lane return at once. The peers are notified before this rank can do anything that follows from the
// failed wait. So a peer that receives data computed from garbage finds its own lane failed before its call ends, and
// poisons its output too. The same happens when the host fails in the middle of a call, and will not launch what the
// peers wait for.
//
// Death. The host checks whether the processes of the peers are alive (common/watch.h), and marks dead peers in its own
// block. This only ends waits for signals that have not come: a peer may have sent its last signal and then exited
// normally.
//
// Memory operations. If possible, the streams of calls that are not captured do all this without these functions (see
// common/host_lane.h), except for sums that overlap with no other work (meeting.cu). Kernels still do two things:
// barriers, and, in the last kernel of a call, the check whether all ranks were in the same call.
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

// 0, or 1 + the rank where a failure began, if a peer has notified this rank of a failure.
__device__ inline uint32_t lane_notice(const Lane& lane) {
  return load_acquire_system(lane.control + lane.block.notice());
}

// Returns where `source` announces calls with even (place 0) or odd (place 1) numbers, in a block of the waiting rank.
__device__ inline Announcement* announced_by(const Lane& lane, uint32_t* block, int source, int place) {
  return reinterpret_cast<Announcement*>(block + lane.block.call(source)) + place;
}

// Sends the next epoch to `peer` on `channel`. To be called by one thread, and for one (peer, channel) always in the
// same stream.
__device__ inline void send_signal(const Lane& lane, const Call& call, int peer, int channel) {
  uint32_t* sent = lane.control + lane.block.sent(peer, channel);
  const uint32_t epoch = *sent + 1;
  *sent = epoch;
  uint32_t* control = block_of(lane, peer);
  if (call.announced != kNoAnnouncement) {
    store_relaxed_system(announced_by(lane, control, lane.rank, place_of(call.announced)), call.announced);
  }
  store_release_system(control + lane.block.slot(lane.rank, channel), epoch);
}

// Notifies the peers, then marks the lane as failed, so the peers are notified before any reader sees the mark. Only
// the first caller to mark the lane writes the record. common/failure_record.h says what `peer` means for each reason.
__device__ inline void fail(const Lane& lane, const Call& call, FailureReason reason, uint32_t peer,
                            uint32_t channel = 0, uint32_t expected = 0, uint32_t found = 0) {
  const int origin = reason == kPeerFailed ? static_cast<int>(peer) : lane.rank;
  for (int other = 0; other < lane.block.world; ++other) {
    // Not the rank where the failure began: it knows already, and has the better description.
    const bool dead = reason == kPeerDied && other == static_cast<int>(peer);
    if (other != lane.rank && other != origin && !dead) {
      store_release_system(block_of(lane, other) + lane.block.notice(), static_cast<uint32_t>(origin) + 1);
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

// To be called when the host cannot go on with a call. If the lane has already failed, the peers already know of it,
// and know where the failure began.
__device__ inline void give_up(const Lane& lane, const Call& call) {
  if (!lane_failed(lane)) fail(lane, call, kGaveUp, static_cast<uint32_t>(lane.rank));
}

// The same as lane_notice, in the block in which the hosts of the ranks notify each other.
__device__ inline uint32_t host_notice(const Lane& lane) {
  return load_acquire_system(lane.host + lane.block.notice());
}

// To be called at the end of a call. Returns whether it failed on this rank, or on a peer that has reported it.
__device__ inline bool call_failed(const Lane& lane, const Call& call) {
  if (lane_failed(lane)) return true;
  const uint32_t told = lane_notice(lane);
  const uint32_t notice = told != 0 ? told : host_notice(lane);
  if (notice == 0) return false;
  if (notice - 1 == static_cast<uint32_t>(lane.rank)) return true;  // this rank's host failed it, and has the record
  // No wait of this rank has noticed the failure. Without a record, the host would not know why its output is NaN.
  fail(lane, call, kPeerFailed, notice - 1);
  return true;
}

// Returns what `peer` has announced in the place for this rank's call, or, with `other` = 1, in the other place.
// `block`: the block of this rank in which the peer's signals arrive. A peer announces its calls in the block that it
// signals in.
__device__ inline Announcement announced_beside(const Lane& lane, uint32_t* block, const Call& call, int peer,
                                                int other = 0) {
  return load_relaxed_system(announced_by(lane, block, peer, place_of(call.announced) ^ other));
}

// Fails because `peer` is in another call. Reports the peer's call with the same number, or else the later of the two
// calls that it has announced.
__device__ inline void fail_as_mismatch(const Lane& lane, uint32_t* block, const Call& call, int peer, int channel) {
  const uint32_t ours = number_of(call.announced);
  Announcement theirs = announced_beside(lane, block, call, peer);
  if (theirs == kNoAnnouncement || number_of(theirs) != ours) {
    const Announcement other = announced_beside(lane, block, call, peer, 1);
    const bool later = theirs == kNoAnnouncement || epoch_reached(number_of(other), number_of(theirs));
    if (other != kNoAnnouncement && later) theirs = other;
  }
  const uint32_t found = theirs == kNoAnnouncement ? kNoCall : number_of(theirs);
  fail(lane, call, kMismatch, static_cast<uint32_t>(peer), channel, ours, found);
}

// To be called after a signal of `peer` has come in `block`. Fails if the signal was not of this call. Once this rank
// or its host knows of a failure, waits end without their signals, and a missing announcement means nothing.
__device__ inline void require_same_call(const Lane& lane, uint32_t* block, const Call& call, int peer, int channel) {
  if (call.announced == kNoAnnouncement || announced_beside(lane, block, call, peer) == call.announced) return;
  if (!lane_failed(lane) && host_notice(lane) == 0) fail_as_mismatch(lane, block, call, peer, channel);
}

// Returns, while a signal of `peer` is awaited, whether the peer has announced another call with this number. If not,
// the peer is only late.
__device__ inline bool in_another_call(const Lane& lane, uint32_t* block, const Call& call, int peer) {
  if (call.announced == kNoAnnouncement) return false;
  const Announcement theirs = announced_beside(lane, block, call, peer);
  return theirs != kNoAnnouncement && number_of(theirs) == number_of(call.announced) && theirs != call.announced;
}

// Waits for an epoch of `peer` on `channel`. Does not count it: `await_signal` has counted it before this call, and
// `count_all` in meeting.cu counts it later.
__device__ inline void await_epoch(const Lane& lane, const Call& call, int peer, int channel, uint32_t expected) {
  // Polling one word is the fast path. The failure words and the clock are checked on the first miss, and then once in
  // a while. Polls are relaxed, and after some of them there are pauses between polls, because polls slow down
  // everything else that uses the memory. Once the signal is there, it is acquired.
  constexpr uint32_t kPollsBetweenChecks = 64;
  constexpr uint32_t kPollsWithoutPause = 64;
  constexpr uint32_t kLongestPauseNs = 256;
  const uint32_t* slot = lane.control + lane.block.slot(peer, channel);
  const int64_t start = global_nanoseconds();
  uint32_t pause_ns = 8;
  for (uint32_t poll = 0;; ++poll) {
    const uint32_t found = load_relaxed_system(slot);
    if (epoch_reached(found, expected)) {
      (void)load_acquire_system(slot);
      require_same_call(lane, lane.control, call, peer, channel);
      return;
    }
    if (poll >= kPollsWithoutPause) {
      if (pause_ns < kLongestPauseNs) pause_ns *= 2;
      pause(pause_ns);
    }
    if (poll % kPollsBetweenChecks != 0) continue;
    // These words end the wait, and nothing that their writers did before is read here: no acquire in a poll.
    if (load_relaxed_system(lane.control + lane.block.failed()) != 0) return;
    if (const uint32_t notice = load_relaxed_system(lane.control + lane.block.notice())) {
      fail(lane, call, kPeerFailed, notice - 1);
      return;
    }
    // Usually, ranks arrive at almost the same time. Some of the words from here on are in host memory, which takes
    // longer to read: among them the announcement of a peer whose other call signals by memory operations.
    if (poll == 0) continue;
#pragma unroll 1
    for (int place = 0; place < 2; ++place) {
      uint32_t* const block = place == 0 ? lane.control : lane.host;
      if (!in_another_call(lane, block, call, peer)) continue;
      fail_as_mismatch(lane, block, call, peer, channel);
      return;
    }
    const uint32_t gone = load_relaxed_system(lane.host + lane.block.gone(peer));
    if (gone == kLaneFailed) return;
    if (gone == kDied) {
      (void)load_acquire_system(lane.host + lane.block.gone(peer));
      // After the mark: everything that the peer sent before it ended has arrived by now.
      if (epoch_reached(load_acquire_system(slot), expected)) {
        require_same_call(lane, lane.control, call, peer, channel);
      } else {
        fail(lane, call, kPeerDied, static_cast<uint32_t>(peer), channel, expected, found);
      }
      return;
    }
    if (global_nanoseconds() - start < static_cast<int64_t>(call.timeout_ns)) continue;
    fail(lane, call, kTimedOut, static_cast<uint32_t>(peer), channel, expected, found);
    return;
  }
}

// Waits for the next epoch of `peer` on `channel`. To be called by one thread, and for one (peer, channel) always in
// the same stream.
__device__ inline void await_signal(const Lane& lane, const Call& call, int peer, int channel) {
  // Counted even if the wait fails: the n-th wait always belongs to the n-th signal.
  uint32_t* awaited = lane.control + lane.block.awaited(peer, channel);
  const uint32_t expected = *awaited + 1;
  *awaited = expected;
  await_epoch(lane, call, peer, channel, expected);
}

}  // namespace symm_overlap::cuda
