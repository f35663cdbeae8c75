#include "cpu/peer.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace symm_overlap::cpu {

ProcessId ProcessId::self() {
  struct stat info{};
  const bool known = ::stat("/proc/self/ns/pid", &info) == 0;
  return {::getpid(), known ? static_cast<uint64_t>(info.st_ino) : 0};
}

Peer::Peer(const ProcessId& id) : id_(id) {
  const ProcessId self = ProcessId::self();
  if (id.pid != self.pid && id.pid_namespace == self.pid_namespace) {
    pidfd_ = static_cast<int>(::syscall(SYS_pidfd_open, id.pid, 0));
  }
}

Peer::Peer(Peer&& other) noexcept : id_(other.id_), pidfd_(std::exchange(other.pidfd_, -1)) {}

Peer::~Peer() {
  if (pidfd_ >= 0) {
    ::close(pidfd_);
  }
}

bool Peer::dead() const {
  pollfd entry{pidfd_, POLLIN, 0};
  return pidfd_ >= 0 && ::poll(&entry, 1, 0) == 1;
}

} // namespace symm_overlap::cpu
