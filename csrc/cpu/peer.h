// The process of a peer rank. It names the peer in the errors of a wait, and detects at once that the peer is gone.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>

namespace symm_overlap::cpu {

// Identifies a process to its peers. A peer's pid is only valid in this process if `pid_namespace` is the same.
struct ProcessId {
  pid_t pid = 0;
  uint64_t pid_namespace = 0;

  static ProcessId self();
};

class Peer {
 public:
  // Returns the Peer of a process. All handles share one Peer for each process, and so one file descriptor, because a
  // program may have hundreds of symmetric tensors.
  static std::shared_ptr<const Peer> of(const ProcessId& id);

  // Throws if this process has reached its limit of open files, because it needs a file to watch the peer.
  explicit Peer(const ProcessId& id);
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  ~Peer();

  // True if the process has exited, even if it is still a zombie. False if this cannot be known (another pid namespace,
  // a kernel before 5.3). In that case only the deadline ends a wait. A process that is ending closes its files before
  // it exits, so `within_ms` is how long to wait for its exit.
  bool dead(int within_ms = 0) const;
  pid_t pid() const { return id_.pid; }

 private:
  ProcessId id_;
  int pidfd_ = -1;
  bool gone_ = false;  // the process had ended and was reaped before it could be watched
};

}  // namespace symm_overlap::cpu
