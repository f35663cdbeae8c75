// Epoch signals between GPUs: the device functions that every kernel with a signal or a wait is made of.
//
// Order. A signal is a release at system scope and a wait an acquire, so whatever came before the signal, in its kernel
// or earlier in its stream (copies too), is seen by whatever comes after the wait. Release is cumulative: no other
// fence is needed.
//
// Calls. A signal carries which call its rank is in, in a word that it stores first, so a wait that has acquired the
// signal can see whether that is its own call. If not, what the peer wrote is not what is expected here.
//
// Failure. A wait that passes its deadline neither traps, which would lose the CUDA context, nor goes on in silence. It
// first tells every peer, then marks its own lane as failed and writes one record for the host. Later waits of the lane
// return at once. As the peers are told before this rank can do anything that follows from the failed wait, a peer that
// is handed data computed from garbage finds its own lane failed before its call ends, and poisons its output too. The
// same happens when the host fails in the middle of a call, and will not launch what the peers wait for.
//
// Death. The host looks whether the processes of the peers live (common/watch.h), and marks those that do not in its
// own block. It ends no more than the waits for signals that have not come: a peer may have sent its last one, and
// ended in peace.
//
// Memory operations. The streams of calls that are not captured do all this without these functions where they can, but
// for sums that nothing hides (meeting.cu): see common/host_lane.h. They leave two things to kernels: barriers, and to
// the last kernel of a call whether all ranks were in the same one.
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
__device__ inline uint32_t lane_notice(const Lane& lane) {
  return load_acquire_system(lane.control + lane.block.notice());
}

// Where `source` announces the calls with even (place 0) or odd numbers, in a block of the rank that waits.
__device__ inline Announcement* announced_by(const Lane& lane, uint32_t* block, int source, int place) {
  return reinterpret_cast<Announcement*>(block + lane.block.call(source)) + place;
}

// The next epoch for `peer` on `channel`. One thread, and always the same stream for one (peer, channel).
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

// Tells the peers, then marks the lane as failed: whoever sees the mark finds the peers told. Only the first to mark it
// writes the record, in which `peer` is what common/failure_record.h says for this reason.
__device__ inline void fail(const Lane& lane, const Call& call, FailureReason reason, uint32_t peer,
                            uint32_t channel = 0, uint32_t expected = 0, uint32_t found = 0) {
  const int origin = reason == kPeerFailed ? static_cast<int>(peer) : lane.rank;
  for (int other = 0; other < lane.block.world; ++other) {
    // Not the rank where it began: that one knows, and knows better.
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

// When the host cannot go on with a call. On a lane that has failed the peers are told already, and where that began.
__device__ inline void give_up(const Lane& lane, const Call& call) {
  if (!lane_failed(lane)) fail(lane, call, kGaveUp, static_cast<uint32_t>(lane.rank));
}

// The same, where the hosts of the ranks tell each other.
__device__ inline uint32_t host_notice(const Lane& lane) {
  return load_acquire_system(lane.host + lane.block.notice());
}

// At the end of a call: whether it failed, here or at a peer that has said so.
__device__ inline bool call_failed(const Lane& lane, const Call& call) {
  if (lane_failed(lane)) return true;
  const uint32_t told = lane_notice(lane);
  const uint32_t notice = told != 0 ? told : host_notice(lane);
  if (notice == 0) return false;
  if (notice - 1 == static_cast<uint32_t>(lane.rank)) return true;  // this rank's host failed it, and has the record
  // No wait of this rank noticed. Without a record, the host would not learn why its output is NaN.
  fail(lane, call, kPeerFailed, notice - 1);
  return true;
}

// What `peer` has announced in the place where this rank's call has its own, or in the other one. `block`: the one of
// this rank in which its signals come: it announces its calls where it signals.
__device__ inline Announcement announced_beside(const Lane& lane, uint32_t* block, const Call& call, int peer,
                                                int other = 0) {
  return load_relaxed_system(announced_by(lane, block, peer, place_of(call.announced) ^ other));
}

// Fails because `peer` is in another call: one of the same number, else the later of the two that it has announced.
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

// After a signal of `peer` has come in `block`: fails if it was not one of this call. Once this rank or its host knows
// of a failure, waits end without their signals, and what a peer has not announced says nothing.
__device__ inline void require_same_call(const Lane& lane, uint32_t* block, const Call& call, int peer, int channel) {
  if (call.announced == kNoAnnouncement || announced_beside(lane, block, call, peer) == call.announced) return;
  if (!lane_failed(lane) && host_notice(lane) == 0) fail_as_mismatch(lane, block, call, peer, channel);
}

// While a signal of `peer` is to come: whether it has announced another call of this number. It is late otherwise.
__device__ inline bool in_another_call(const Lane& lane, uint32_t* block, const Call& call, int peer) {
  if (call.announced == kNoAnnouncement) return false;
  const Announcement theirs = announced_beside(lane, block, call, peer);
  return theirs != kNoAnnouncement && number_of(theirs) == number_of(call.announced) && theirs != call.announced;
}

// Waits for an epoch of `peer` on `channel`, and leaves it to others to count.
__device__ inline void await_epoch(const Lane& lane, const Call& call, int peer, int channel, uint32_t expected) {
  // Polling one word is the fast path; failure words and clock are looked at on the first miss, and then now and then.
  // Polls are relaxed, and after some of them there are pauses in between, because they slow down whatever else uses
  // the memory. Once the signal is there, it is acquired.
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
    // What these words say ends the wait, and nothing that their writers did before is read here: no acquire in a poll.
    if (load_relaxed_system(lane.control + lane.block.failed()) != 0) return;
    if (const uint32_t notice = load_relaxed_system(lane.control + lane.block.notice())) {
      fail(lane, call, kPeerFailed, notice - 1);
      return;
    }
    // Ranks miss each other by little, as a rule, and some of the words from here on are in the host's memory, which
    // takes longer to read: among them the announcement of a peer whose other call signals by memory operations.
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
      // Behind the mark: what the peer sent before it ended is here by now.
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

// Waits for the next epoch of `peer` on `channel`. One thread, and always the same stream for one (peer, channel).
__device__ inline void await_signal(const Lane& lane, const Call& call, int peer, int channel) {
  // Counted up even when the wait fails: the n-th wait stands for the n-th signal whatever happens.
  uint32_t* awaited = lane.control + lane.block.awaited(peer, channel);
  const uint32_t expected = *awaited + 1;
  *awaited = expected;
  await_epoch(lane, call, peer, channel, expected);
}

}  // namespace symm_overlap::cuda
