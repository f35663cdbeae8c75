// What a rank announces about its calls, so that a peer can check whether both are in the same call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace symm_overlap::cpu {

struct Call {
  uint64_t hash = 0;   // hash of everything that must be the same on every rank; 0: announce and compare nothing
  int64_t number = 0;  // the index of the call on this rank, from 0 on
};

// There is one call slot for each (source, reader) pair of ranks, in the reader's control object, in its own cache
// line. Only the source writes it, before its first signal of the call, so a reader that has acquired such a signal
// sees it. There is one place for calls with even numbers and one for calls with odd numbers. Two are enough, because a
// rank cannot begin call n+2 before every peer has finished call n.
struct alignas(64) CallSlot {
  std::atomic<uint64_t> hashes[2];
  std::atomic<int64_t> counts[2];  // the number of the call plus 1; 0: no call yet

  void announce(const Call& call) {
    const int place = place_of(call);
    hashes[place].store(call.hash, std::memory_order_relaxed);
    counts[place].store(call.number + 1, std::memory_order_release);  // its reader must not see an older hash
  }

  // To be called after a signal of the source's call has been acquired: whether that call is the same as ours.
  bool same(const Call& ours) const {
    const int place = place_of(ours);
    return counts[place].load(std::memory_order_acquire) == ours.number + 1 &&
           hashes[place].load(std::memory_order_relaxed) == ours.hash;
  }

  // To be called while the source's signal has not arrived: whether the source is known to be in another call with our
  // number, or in a later call. A source that is in an earlier call may still reach our call.
  bool elsewhere(const Call& ours) const {
    return count_of(ours) == ours.number + 1 ? !same(ours) : latest() > ours.number;
  }

  // The number of the source's call to report if it is not our call; -1 if the source has not announced a call.
  int64_t number_of(const Call& ours) const { return count_of(ours) == ours.number + 1 ? ours.number : latest(); }

 private:
  static int place_of(const Call& call) { return static_cast<int>(call.number % 2); }
  int64_t count_of(const Call& call) const { return counts[place_of(call)].load(std::memory_order_acquire); }
  int64_t latest() const {
    return std::max(counts[0].load(std::memory_order_acquire), counts[1].load(std::memory_order_acquire)) - 1;
  }
};
static_assert(sizeof(CallSlot) == 64 && std::atomic<uint64_t>::is_always_lock_free);

}  // namespace symm_overlap::cpu
