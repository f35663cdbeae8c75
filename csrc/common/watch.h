// The thread that looks after the waits of all lanes of this process (host_lane.h).
//
// It is C++ alone: it takes no GIL, which a busy thread of Python could keep, and it makes no CUDA call, which could
// stand behind what it is to end, or make a context on another GPU, or disturb the capture of a graph. It runs until
// the process is no more: while the interpreter ends, a wait that nobody ends would hold up the driver's own end. That
// also frees what CUDA has allocated, so from then on only lanes in shared memory are looked at.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "common/host_lane.h"

namespace symm_overlap {

class Watch {
 public:
  static constexpr std::chrono::milliseconds kBetweenLooks{100};

  // The one of this process. Never destroyed, as its thread is never joined.
  static Watch& of_this_process() {
    static Watch* const watch = new Watch;
    return *watch;
  }

  // From now on. `died` says whether the process of a rank is no more.
  void look_after(std::shared_ptr<HostLane> lane, std::function<bool(int)> died) {
    const std::lock_guard lock(mutex_);
    if (!running_) {
      std::thread([this] { run(); }).detach();
      // After CUDA's own functions for the end of the process were registered, so it runs before them.
      std::atexit([] { of_this_process().end(); });
      running_ = true;
    }
    lanes_.push_back({std::move(lane), std::move(died)});
  }

  // No longer. False where a stream may still wait in the lane's memory, which therefore must stay: the lane is looked
  // after until the process ends.
  bool leave(const std::shared_ptr<HostLane>& lane) {
    if (::getpid() != process_) return false;  // a fork: the thread is not here, and may have had the lock
    const std::lock_guard lock(mutex_);
    if (!lane->idle()) return false;
    lanes_.erase(std::remove_if(lanes_.begin(), lanes_.end(), [&](const Watched& each) { return each.lane == lane; }),
                 lanes_.end());
    return true;
  }

 private:
  struct Watched {
    std::shared_ptr<HostLane> lane;
    std::function<bool(int)> died;
  };

  void run() {
    sigset_t all;  // a signal is for a thread that Python knows: it is to end what that one waits for
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
    while (true) {
      std::this_thread::sleep_for(kBetweenLooks);
      const std::lock_guard lock(mutex_);
      for (const Watched& each : lanes_) each.lane->look(std::chrono::steady_clock::now(), each.died);
    }
  }

  void end() {
    if (::getpid() != process_) return;  // a process that was forked from a rank ends in silence
    const std::lock_guard lock(mutex_);
    lanes_.erase(std::remove_if(lanes_.begin(), lanes_.end(), [](const Watched& each) { return !each.lane->end(); }),
                 lanes_.end());
  }

  const pid_t process_ = ::getpid();
  std::mutex mutex_;
  std::vector<Watched> lanes_;
  bool running_ = false;
};

}  // namespace symm_overlap
