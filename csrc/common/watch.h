// The thread that checks the waits of all lanes of this process (host_lane.h).
//
// The thread runs only C++. It does not acquire the GIL, which a busy Python thread could hold. It makes no CUDA call,
// because a CUDA call could be queued behind the wait that the thread must end, could create a context on another GPU,
// or could disturb the capture of a graph. The thread runs until the process has ended: while the interpreter ends, a
// wait that is never ended would block the shutdown of the CUDA driver. This shutdown also frees the memory that CUDA
// has allocated, so from then on only lanes in shared memory are checked.
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

  // The only watch of this process. It is never destroyed, because its thread is never joined.
  static Watch& of_this_process() {
    static Watch* const watch = new Watch;
    return *watch;
  }

  // Checks `lane` from now on. `died` returns whether the process of a rank has ended.
  void look_after(std::shared_ptr<HostLane> lane, std::function<bool(int)> died) {
    const std::lock_guard lock(mutex_);
    if (!running_) {
      std::thread([this] { run(); }).detach();
      // CUDA has already registered its own functions for the end of the process, so this one runs before them.
      std::atexit([] { of_this_process().end(); });
      running_ = true;
    }
    lanes_.push_back({std::move(lane), std::move(died)});
  }

  // Stops checking `lane`. Returns false if a stream may still wait in the lane's memory. This memory must then stay
  // allocated, and the lane is checked until the process ends.
  bool leave(const std::shared_ptr<HostLane>& lane) {
    // A forked process has no such thread, and the lock may have been held when it was forked.
    if (::getpid() != process_) return false;
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
    sigset_t all;  // a signal is meant to end a wait of a thread that Python knows, so it must reach such a thread
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
    while (true) {
      std::this_thread::sleep_for(kBetweenLooks);
      const std::lock_guard lock(mutex_);
      for (const Watched& each : lanes_) each.lane->look(std::chrono::steady_clock::now(), each.died);
    }
  }

  void end() {
    if (::getpid() != process_) return;  // a process that was forked from a rank has nothing to end
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
