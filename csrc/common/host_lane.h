// The host's half of a lane on a GPU: what streams are to do in the host blocks (control_block.h), and who ends the
// waits there that the signal does not end.
//
// A wait by a memory operation knows neither deadlines nor failures, and nothing but the awaited word ends it. So the
// host keeps a list of the waits that may be going on, looks at it a few times a second (watch.h), and fails the lane
// where the stream waits past the deadline, the peer has died, has failed, or is in another call. What a kernel does
// that fails (signal.cuh), the host does here, in the same order: it tells the peers, then marks its own lane, and only
// then ends its waits. So whoever goes on because of that finds the lane failed when its call ends, on every rank.
//
// The host ends a wait by raising the word to the awaited epoch. A signal that comes later than that, of an epoch
// before, may lower it again; so the words of a failed lane are raised at every look. Peers send finitely many.
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

// What a stream is to do with a word of the host block of `rank`.
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

  // `blocks`: every rank's host block, as this process addresses it; null where the ranks share none. `stay`: whether
  // they are there until the process is no more, as memory shared with others is, and not what CUDA has allocated.
  // `device_record`: where the kernels of the lane write their failure.
  HostLane(ControlBlock block, int rank, std::vector<uint32_t*> blocks, bool stay, const FailureRecord* device_record)
      : block_(block),
        rank_(rank),
        blocks_(std::move(blocks)),
        stay_(stay),
        device_record_(device_record),
        sent_(static_cast<size_t>(block.world) * block.channels),
        awaited_(sent_.size()),
        dead_(block.world) {}

  // What a stream does to signal, or to wait for, some peers on a channel. It must be enqueued, once and whole. By one
  // thread at a time, and every wait of one (peer, channel) by the same stream or by streams that follow one another.
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
    if (ended_ && !failed_) fail(kGaveUp, call, rank_);  // nobody would end it
    if (failed_ || peers.empty()) return {};
    Waiting waiting{call, channel, {}, {}};
    for (const int peer : peers) waiting.epochs.emplace_back(peer, ++awaited_[at(peer, channel)]);
    const auto [first, epoch] = waiting.epochs.front();
    // The deadline counts from when the stream comes here, which may be long after it is told to.
    MemoryOperations operations{{MemoryOperation::kWrite32, rank_, block_.reached(first, channel), epoch}};
    for (const auto& [peer, awaited] : waiting.epochs) {
      operations.push_back({MemoryOperation::kWait32, rank_, block_.slot(peer, channel), awaited});
    }
    waiting_.push_back(std::move(waiting));
    return operations;
  }

  // A call whose waits are kernels has been given its last launch, the one with the number `end` in the record's
  // `ended`.
  void launched(const Call& call, uint32_t end) {
    const std::lock_guard lock(mutex_);
    by_kernels_ = call;
    end_ = end;
  }

  // When the host cannot go on with a call.
  void give_up(const Call& call) {
    const std::lock_guard lock(mutex_);
    if (!failed_) fail(kGaveUp, call, rank_);
    raise();
  }

  // At the end of the process: nothing is awaited any more. Whether the lane is still to be looked at, because a stream
  // that is to pass its waits may be shut out by late signals of peers, and its blocks stay. What CUDA has allocated is
  // not read again.
  bool end() {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    forget_reached();
    if (!failed_ && !waiting_.empty()) fail(kGaveUp, waiting_.front().call, rank_);
    if (!failed_ && !ran()) fail(kGaveUp, by_kernels_, rank_);
    if (failed_) raise();
    return failed_ && stay_;
  }

  // Fails the lane if it must, and ends the waits of one that has failed. `died`: whether the process of a rank is no
  // more.
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

  // Whether no wait is left to look after.
  bool idle() {
    const std::lock_guard lock(mutex_);
    forget_reached();
    return !failed_ && waiting_.empty() && ran();
  }

  // What the host has found; the failures that kernels find are not among them.
  std::optional<FailureRecord> failure() {
    const std::lock_guard lock(mutex_);
    return record_;
  }

 private:
  struct Waiting {
    Call call;
    int channel;
    std::vector<std::pair<int, uint32_t>> epochs;  // by peer
    std::optional<Time> since;                     // when the stream was first seen to be there
  };

  static uint32_t load(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
  static void store(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
  size_t at(int peer, int channel) const { return static_cast<size_t>(peer) * block_.channels + channel; }
  uint32_t* own() const { return blocks_[rank_]; }
  uint32_t found(int peer, int channel) const { return load(own() + block_.slot(peer, channel)); }

  // Whether the kernels of the latest call in which these wait have come to its end.
  bool ran() const { return epoch_reached(load(&device_record_->ended), end_); }

  // The first of the awaited signals that has not come.
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
      // Where no wait is going on, the last kernel of the next call finds the notice, and has that call on record.
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
      // Dead first, then the slot: what the peer sent before it ended has come.
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

  // Whether a peer whose signal is to come has announced another call of this number. It is late otherwise.
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

  // The peers first, but not the rank where the failure began; then the own kernels.
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

  // Ends every wait that may be going on. By an exchange, so that no later epoch of the peer is overwritten.
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

  std::mutex mutex_;  // of all that follows
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
