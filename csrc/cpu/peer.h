// A peer rank as a process: enough to say who is being waited for, and to notice at once that it is gone.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace symm_overlap::cpu {

// Identifies this process to its peers. `pid_namespace` tells whether a peer's pid means anything here.
struct ProcessId {
  pid_t pid = 0;
  uint64_t pid_namespace = 0;

  static ProcessId self();
};

class Peer {
 public:
  explicit Peer(const ProcessId& id);
  Peer(Peer&& other) noexcept;
  Peer& operator=(Peer&&) = delete;
  ~Peer();

  // True when the process has exited, also as a zombie that nobody has waited for. False when that cannot be known
  // (another pid namespace, a kernel before 5.3): then only the deadline ends a wait.
  bool dead() const;
  pid_t pid() const {
    return id_.pid;
  }

 private:
  ProcessId id_;
  int pidfd_ = -1;
};

} // namespace symm_overlap::cpu
