// The host's half of a lane on a GPU. It determines the memory operations of streams in the host blocks
// (control_block.h), and it ends waits there whose signal does not arrive.
//
// A wait by a memory operation has no deadline and does not notice failures. It ends only when the awaited word
// changes. So the host keeps a list of the waits that may be in progress and checks it a few times a second (watch.h).
// It fails the lane if the stream waits past the deadline, or if the peer has died, has failed, or is in another call.
// The host does the same as a kernel that fails (signal.cuh), in the same order: it notifies the peers, then marks its
// own lane as failed, and only then ends its waits. So on every rank, a stream that continues for this reason finds
// that the lane has failed when its call ends.
//
// The host ends a wait by raising the word to the awaited epoch. If a signal of an earlier epoch arrives later, it may
// lower the word again. So the words of a failed lane are raised at every check. Peers send finitely many signals.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "common/call.h"
#include "common/control_block.h"
#include "common/epoch.h"
#include "common/failure_record.h"

namespace symm_overlap {

// An operation that a stream must carry out on a word of the host block of `rank`.
struct MemoryOperation {
  enum Kind { kWrite32, kWrite64, kWait32 };  // a wait ends at epoch_reached(word, value)
  Kind kind;
  int rank;
  size_t word;
  uint64_t value;
};
using MemoryOperations = std::vector<MemoryOperation>;

class HostLane {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // `blocks`: the address of every rank's host block in this process; null if the ranks share none. `stay`: whether the
  // blocks exist until the process has ended, as shared memory does. Memory that CUDA has allocated does not.
  // `device_record`: the record to which the kernels of the lane write their failure.
  HostLane(ControlBlock block, int rank, std::vector<uint32_t*> blocks, bool stay, const FailureRecord* device_record)
      : block_(block),
        rank_(rank),
        blocks_(std::move(blocks)),
        stay_(stay),
        device_record_(device_record),
        sent_(static_cast<size_t>(block.world) * block.channels),
        awaited_(sent_.size()),
        dead_(block.world) {}

  // Return the operations by which a stream signals, or waits for, some peers on a channel. All of them must be
  // enqueued, exactly once. Only one thread at a time may call this. All waits for one (peer, channel) must be on the
  // same stream, or on streams that follow one another.
  MemoryOperations signal(const Call& call, const std::vector<int>& peers, int channel) {
    MemoryOperations operations;
    for (const int peer : peers) {
      if (call.announced == kNoAnnouncement) continue;
      const size_t word = block_.call(rank_) + 2 * static_cast<size_t>(place_of(call.announced));
      operations.push_back({MemoryOperation::kWrite64, peer, word, call.announced});
    }
    for (const int peer : peers) {
      operations.push_back({MemoryOperation::kWrite32, peer, block_.slot(rank_, channel), ++sent_[at(peer, channel)]});
    }
    return operations;
  }

  MemoryOperations wait(const Call& call, const std::vector<int>& peers, int channel) {
    const std::lock_guard lock(mutex_);
    if (ended_ && !failed_) fail(kGaveUp, call, rank_);  // the host no longer ends waits
    if (failed_ || peers.empty()) return {};
    Waiting waiting{call, channel, {}, {}};
    for (const int peer : peers) waiting.epochs.emplace_back(peer, ++awaited_[at(peer, channel)]);
    const auto [first, epoch] = waiting.epochs.front();
    // The deadline starts when the stream reaches this write, which may be long after the write is enqueued.
    MemoryOperations operations{{MemoryOperation::kWrite32, rank_, block_.reached(first, channel), epoch}};
    for (const auto& [peer, awaited] : waiting.epochs) {
      operations.push_back({MemoryOperation::kWait32, rank_, block_.slot(peer, channel), awaited});
    }
    waiting_.push_back(std::move(waiting));
    return operations;
  }

  // To be called when the last kernel of a call that waits in kernels has been launched. This kernel writes the number
  // `end` to `ended` of the record.
  void launched(const Call& call, uint32_t end) {
    const std::lock_guard lock(mutex_);
    by_kernels_ = call;
    end_ = end;
  }

  // To be called when the host cannot continue a call.
  void give_up(const Call& call) {
    const std::lock_guard lock(mutex_);
    if (!failed_) fail(kGaveUp, call, rank_);
    raise();
  }

  // To be called at the end of the process: ends all waits. Returns whether the lane must still be checked. It must if
  // the lane has failed and its blocks stay, because late signals of peers could again block a stream that must pass
  // its waits. Memory that CUDA has allocated is not read again.
  bool end() {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    forget_reached();
    if (!failed_ && !waiting_.empty()) fail(kGaveUp, waiting_.front().call, rank_);
    if (!failed_ && !ran()) fail(kGaveUp, by_kernels_, rank_);
    if (failed_) raise();
    return failed_ && stay_;
  }

  // Checks the lane: fails it if necessary, and ends its waits if it has failed. `died`: whether the process of a rank
  // has ended.
  void look(Time now, const std::function<bool(int)>& died) {
    const std::lock_guard lock(mutex_);
    for (int peer = 0; peer < block_.world; ++peer) {
      if (peer == rank_ || dead_[peer] || !died(peer)) continue;
      dead_[peer] = true;
      if (!failed_) store(own() + block_.gone(peer), kDied);
    }
    if (!failed_) look_for_failure(now);
    if (failed_) raise();
  }

  // Whether no wait is left to check.
  bool idle() {
    const std::lock_guard lock(mutex_);
    forget_reached();
    return !failed_ && waiting_.empty() && ran();
  }

  // The failure that the host has found, if any. Failures that kernels find are not included.
  std::optional<FailureRecord> failure() {
    const std::lock_guard lock(mutex_);
    return record_;
  }

 private:
  struct Waiting {
    Call call;
    int channel;
    std::vector<std::pair<int, uint32_t>> epochs;  // by peer
    std::optional<Time> since;                     // when the host first saw that the stream has reached the wait
  };

  static uint32_t load(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
  static void store(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
  size_t at(int peer, int channel) const { return static_cast<size_t>(peer) * block_.channels + channel; }
  uint32_t* own() const { return blocks_[rank_]; }
  uint32_t found(int peer, int channel) const { return load(own() + block_.slot(peer, channel)); }

  // Whether the latest call that waits in kernels has run to its end.
  bool ran() const { return epoch_reached(load(&device_record_->ended), end_); }

  // The first awaited signal that has not arrived.
  std::optional<std::pair<int, uint32_t>> lacks(const Waiting& waiting) const {
    for (const auto& [peer, epoch] : waiting.epochs) {
      if (!epoch_reached(found(peer, waiting.channel), epoch)) return std::pair(peer, epoch);
    }
    return std::nullopt;
  }

  void forget_reached() {
    std::deque<Waiting> left;
    for (Waiting& waiting : waiting_) {
      if (lacks(waiting)) left.push_back(std::move(waiting));
    }
    waiting_ = std::move(left);
  }

  void look_for_failure(Time now) {
    forget_reached();
    if (const uint32_t notice = load(own() + block_.notice())) {
      const int origin = static_cast<int>(notice) - 1;
      // If no wait is in progress, the last kernel of the next call finds the notice and records that call.
      return waiting_.empty() ? tell(origin) : fail(kPeerFailed, waiting_.front().call, origin);
    }
    if (const uint32_t reason = load(&device_record_->reason)) {
      return tell(reason == kPeerFailed ? static_cast<int>(device_record_->peer) : rank_);
    }
    for (Waiting& waiting : waiting_) {
      look_at(waiting, now);
      if (failed_) return;
    }
  }

  void look_at(Waiting& waiting, Time now) {
    for (const auto& [peer, epoch] : waiting.epochs) {
      // `dead_` was set before this reads the slot, so a signal that the peer sent before it ended has arrived.
      const uint32_t there = found(peer, waiting.channel);
      if (epoch_reached(there, epoch)) continue;
      if (dead_[peer]) return fail(kPeerDied, waiting.call, peer, waiting.channel, epoch, there);
      if (in_another_call(waiting.call, peer)) {
        const uint32_t number = number_of(waiting.call.announced);
        return fail(kMismatch, waiting.call, peer, waiting.channel, number, number);
      }
    }
    const auto [first, first_epoch] = waiting.epochs.front();
    if (!epoch_reached(load(own() + block_.reached(first, waiting.channel)), first_epoch)) return;
    if (!waiting.since) waiting.since = now;
    if (now - *waiting.since < std::chrono::nanoseconds(waiting.call.timeout_ns)) return;
    if (const auto lacking = lacks(waiting)) {
      const auto [peer, epoch] = *lacking;
      fail(kTimedOut, waiting.call, peer, waiting.channel, epoch, found(peer, waiting.channel));
    }
  }

  // Whether a peer whose signal has not arrived has announced another call with this number. If not, it is only late.
  bool in_another_call(const Call& call, int peer) const {
    if (call.announced == kNoAnnouncement) return false;
    const auto* places = reinterpret_cast<const Announcement*>(own() + block_.call(peer));
    const Announcement theirs = __atomic_load_n(places + place_of(call.announced), __ATOMIC_ACQUIRE);
    return theirs != kNoAnnouncement && number_of(theirs) == number_of(call.announced) && theirs != call.announced;
  }

  void fail(FailureReason reason, const Call& call, int peer, int channel = 0, uint32_t expected = 0,
            uint32_t found = 0) {
    record_ = FailureRecord{
        reason, call.op, call.number, static_cast<uint32_t>(peer), static_cast<uint32_t>(channel), expected, found, 0};
    tell(reason == kPeerFailed ? peer : rank_);
  }

  // Notifies the peers first, except for the rank where the failure began, and then the kernels of this rank.
  void tell(int origin) {
    const uint32_t notice = static_cast<uint32_t>(origin) + 1;
    for (int other = 0; other < block_.world; ++other) {
      if (other != rank_ && other != origin && blocks_[other] != nullptr)
        store(blocks_[other] + block_.notice(), notice);
    }
    store(own() + block_.notice(), notice);
    for (int peer = 0; peer < block_.world; ++peer) store(own() + block_.gone(peer), kLaneFailed);
    failed_ = true;
    waiting_.clear();
  }

  // Ends every wait that may be in progress. Uses compare-and-exchange, so that no later epoch of the peer is
  // overwritten.
  void raise() {
    for (int peer = 0; peer < block_.world; ++peer) {
      for (int channel = 0; channel < block_.channels; ++channel) {
        uint32_t* slot = own() + block_.slot(peer, channel);
        const uint32_t awaited = awaited_[at(peer, channel)];
        uint32_t there = load(slot);
        while (!epoch_reached(there, awaited) &&
               !__atomic_compare_exchange_n(slot, &there, awaited, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        }
      }
    }
  }

  ControlBlock block_;
  int rank_;
  std::vector<uint32_t*> blocks_;
  bool stay_;
  const FailureRecord* device_record_;
  std::vector<uint32_t> sent_;

  std::mutex mutex_;  // protects all members below
  std::vector<uint32_t> awaited_;
  std::deque<Waiting> waiting_;
  Call by_kernels_{};
  uint32_t end_ = 0;
  std::vector<bool> dead_;
  bool failed_ = false;
  bool ended_ = false;
  std::optional<FailureRecord> record_;
};

}  // namespace symm_overlap
