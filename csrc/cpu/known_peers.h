// The processes of a group's ranks, as far as this process has read about them in the group's store. This knowledge
// outlives the store. If the rank that hosts the store ends, the other ranks can still report which rank that was.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <optional>
#include <string>

#include "cpu/peer.h"

namespace symm_overlap::cpu {

// Returns nullopt if nothing is known about the rank, and null for a rank on another host, which cannot be watched from
// this host.
std::optional<std::shared_ptr<const Peer>> known_peer(c10d::ProcessGroup& group, int rank);
void remember_peer(c10d::ProcessGroup& group, int rank, std::shared_ptr<const Peer> peer);

// Returns all ranks that are known to have ended, such as "rank 0 (pid 12) is dead, rank 3 (pid 15) is dead". Empty if
// there is none.
std::string dead_peers(c10d::ProcessGroup& group);

}  // namespace symm_overlap::cpu
