// What the host knows of the gates (control_block.h) of one lane: how often each was passed, and which may be shut.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "common/epoch.h"

namespace symm_overlap {

class PendingGates {
 public:
  using Time = std::chrono::steady_clock::time_point;
  struct Gate {
    int peer;
    int channel;
    uint32_t epoch;
  };

  PendingGates(int world, int channels)
      : channels_(channels),
        sent_(static_cast<size_t>(world) * channels),
        awaited_(static_cast<size_t>(world) * channels) {}

  // The next epoch of the gate of `peer` for this rank, and of this rank's gate for `peer`. By one thread at a time.
  uint32_t next_sent(int peer, int channel) { return ++sent_.at(peer * channels_ + channel); }
  uint32_t next_awaited(int peer, int channel) { return ++awaited_.at(peer * channels_ + channel); }

  // From `now` on a stream may be waiting at this gate, in this call of the lane.
  void add(uint32_t call, Gate gate, Time now) {
    const std::lock_guard lock(mutex_);
    pending_.push_back({call, gate, now});
  }

  // The gates that streams may have been waiting at since before `since`, each with its latest epoch. Calls up to
  // `ended` have come to their end, and are forgotten. A gate is returned until its call has ended: a peer that was
  // late may have shut it again.
  std::vector<Gate> overdue(uint32_t ended, Time since) {
    const std::lock_guard lock(mutex_);
    while (!pending_.empty() && epoch_reached(ended, pending_.front().call)) pending_.pop_front();
    std::map<std::pair<int, int>, uint32_t> latest;
    for (const Pending& pending : pending_) {
      if (pending.since > since) break;
      latest[{pending.gate.peer, pending.gate.channel}] = pending.gate.epoch;
    }
    std::vector<Gate> gates;
    for (const auto& [gate, epoch] : latest) gates.push_back({gate.first, gate.second, epoch});
    return gates;
  }

 private:
  struct Pending {
    uint32_t call;
    Gate gate;
    Time since;
  };

  int channels_;
  std::vector<uint32_t> sent_;
  std::vector<uint32_t> awaited_;
  std::mutex mutex_;
  std::deque<Pending> pending_;
};

}  // namespace symm_overlap
