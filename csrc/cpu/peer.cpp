#include "cpu/peer.h"

#include <c10/util/Exception.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "cpu/file_limit.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace symm_overlap::cpu {

ProcessId ProcessId::self() {
  struct stat info{};
  const bool known = ::stat("/proc/self/ns/pid", &info) == 0;
  return {::getpid(), known ? static_cast<uint64_t>(info.st_ino) : 0};
}

std::shared_ptr<const Peer> Peer::of(const ProcessId& id) {
  struct Known {
    std::mutex mutex;
    std::map<std::pair<pid_t, uint64_t>, std::weak_ptr<const Peer>> peers;
  };
  static auto* const all = new Known;  // never destroyed: threads may still wait
  const std::lock_guard lock(all->mutex);
  auto& known = all->peers[{id.pid, id.pid_namespace}];
  auto peer = known.lock();
  if (!peer || peer->dead()) {  // the pid of a dead process may belong to a new process by now
    peer = std::make_shared<const Peer>(id);
    known = peer;
  }
  return peer;
}

Peer::Peer(const ProcessId& id) : id_(id) {
  const ProcessId self = ProcessId::self();
  if (id.pid != self.pid && id.pid_namespace == self.pid_namespace) {
    pidfd_ = static_cast<int>(::syscall(SYS_pidfd_open, id.pid, 0));
    const int error = errno;
    gone_ = pidfd_ < 0 && error == ESRCH;
    TORCH_CHECK(pidfd_ >= 0 || !out_of_files(error), "symm_overlap: cannot watch the process of a peer (pid ", id.pid,
                "): ", std::strerror(error), kFileAdvice);
  }
}

Peer::~Peer() {
  if (pidfd_ >= 0) {
    ::close(pidfd_);
  }
}

bool Peer::dead(int within_ms) const {
  pollfd entry{pidfd_, POLLIN, 0};
  return gone_ || (pidfd_ >= 0 && ::poll(&entry, 1, within_ms) == 1);
}

}  // namespace symm_overlap::cpu
