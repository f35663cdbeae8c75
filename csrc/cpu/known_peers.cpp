#include "cpu/known_peers.h"

#include <c10/util/intrusive_ptr.h>

#include <map>
#include <mutex>
#include <utility>

namespace symm_overlap::cpu {

namespace {

using Peers = std::map<int, std::shared_ptr<const Peer>>;

struct Known {
  // As long as this weak pointer exists, no other group can have the same address.
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  Peers peers;
};

std::mutex groups_mutex;

std::map<const c10d::ProcessGroup*, Known>& groups() {
  static auto* const all = new std::map<const c10d::ProcessGroup*, Known>;  // never destroyed: threads may still wait
  return *all;
}

Peers peers_of(const c10d::ProcessGroup& group) {
  const std::lock_guard lock(groups_mutex);
  const auto known = groups().find(&group);
  return known == groups().end() ? Peers{} : known->second.peers;
}

}  // namespace

std::optional<std::shared_ptr<const Peer>> known_peer(c10d::ProcessGroup& group, int rank) {
  const std::lock_guard lock(groups_mutex);
  const auto known = groups().find(&group);
  if (known == groups().end()) {
    return std::nullopt;
  }
  const auto peer = known->second.peers.find(rank);
  return peer == known->second.peers.end() ? std::nullopt : std::optional(peer->second);
}

void remember_peer(c10d::ProcessGroup& group, int rank, std::shared_ptr<const Peer> peer) {
  const std::lock_guard lock(groups_mutex);
  auto& all = groups();
  if (all.count(&group) == 0) {
    for (auto each = all.begin(); each != all.end();) {
      each = each->second.group.expired() ? all.erase(each) : std::next(each);
    }
    const auto owned = c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(&group);
    all.emplace(&group, Known{c10::weak_intrusive_ptr<c10d::ProcessGroup>(owned), {}});
  }
  all.at(&group).peers[rank] = std::move(peer);
}

std::string dead_peers(c10d::ProcessGroup& group) {
  std::string dead;
  for (const auto& [rank, peer] : peers_of(group)) {
    if (peer && peer->dead()) {
      dead += (dead.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (pid " + std::to_string(peer->pid()) +
              ") is dead";
    }
  }
  return dead;
}

}  // namespace symm_overlap::cpu
