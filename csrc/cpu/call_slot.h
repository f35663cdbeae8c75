// What a rank announces about the calls it is in, so that a peer can tell whether both are in the same call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace symm_overlap::cpu {

struct Call {
  uint64_t hash = 0;   // of everything that must be the same on every rank; 0: announce and compare nothing
  int64_t number = 0;  // this rank's count of its calls, from 0 on
};

// One for each (source, reader) pair of ranks, in the reader's control object, and a cache line of its own. Only the
// source writes it, before its first signal of the call, so a reader that has acquired such a signal sees it. Calls
// with even and with odd numbers have a place each: a rank cannot begin call n+2 before every peer has finished call n.
struct alignas(64) CallSlot {
  std::atomic<uint64_t> hashes[2];
  std::atomic<int64_t> counts[2];  // the number of the call plus 1; 0: no call yet

  void announce(const Call& call) {
    const int place = place_of(call);
    hashes[place].store(call.hash, std::memory_order_relaxed);
    counts[place].store(call.number + 1, std::memory_order_release);  // whoever reads it must not see an older hash
  }

  // After a signal of the source's call has been acquired: whether that call is ours.
  bool same(const Call& ours) const {
    const int place = place_of(ours);
    return counts[place].load(std::memory_order_acquire) == ours.number + 1 &&
           hashes[place].load(std::memory_order_relaxed) == ours.hash;
  }

  // While its signal is still to come: whether the source is known to be in another call, or in a later one. A source
  // that is behind may still come.
  bool elsewhere(const Call& ours) const {
    return count_of(ours) == ours.number + 1 ? !same(ours) : latest() > ours.number;
  }

  // The number of the source's call to report when it is not ours; -1 when it has announced none.
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
