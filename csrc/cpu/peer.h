// A peer rank as a process: enough to say who is being waited for, and to notice at once that it is gone.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>

namespace symm_overlap::cpu {

// Identifies this process to its peers. `pid_namespace` tells whether a peer's pid means anything here.
struct ProcessId {
  pid_t pid = 0;
  uint64_t pid_namespace = 0;

  static ProcessId self();
};

class Peer {
 public:
  // All handles share one Peer, and so one descriptor, for each process: a program may have hundreds of symmetric
  // tensors.
  static std::shared_ptr<const Peer> of(const ProcessId& id);

  // Throws when this process may open no further file, without which it could not watch the peer.
  explicit Peer(const ProcessId& id);
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  ~Peer();

  // True when the process has exited, also as a zombie that nobody has waited for. False when that cannot be known
  // (another pid namespace, a kernel before 5.3): then only the deadline ends a wait. A process that is just ending
  // closes its files first; `within_ms` gives it time for the rest.
  bool dead(int within_ms = 0) const;
  pid_t pid() const { return id_.pid; }

 private:
  ProcessId id_;
  int pidfd_ = -1;
  bool gone_ = false;  // it had ended, and been reaped, before it could be watched
};

}  // namespace symm_overlap::cpu
