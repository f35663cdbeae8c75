#include "cpu/meeting.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <sstream>
#include <thread>
#include <utility>

#include "cpu/deadline.h"
#include "cpu/file_limit.h"
#include "cpu/known_peers.h"
#include "cpu/peer.h"

namespace symm_overlap::cpu {

namespace {

constexpr std::chrono::microseconds kFirstPause{50};
constexpr std::chrono::microseconds kLongestPause{20'000};
constexpr std::chrono::milliseconds kLookUp{100};  // how often a wait checks whether its peer is alive

std::string process_key(const std::string& group_name, int rank) {
  return "symm_overlap/process/" + group_name + "/" + std::to_string(rank);
}

}  // namespace

std::string boot_id() {
  static const auto* const id = [] {  // never destroyed: threads may still wait
    constexpr const char* kFile = "/proc/sys/kernel/random/boot_id";
    char text[64] = {};
    const int file = ::open(kFile, O_RDONLY | O_CLOEXEC);
    const int error = errno;
    TORCH_CHECK(file >= 0 || !out_of_files(error), "symm_overlap: cannot read ", kFile,
                ", which tells whether ranks are on one host: ", std::strerror(error), kFileAdvice);
    const ssize_t size = file >= 0 ? ::read(file, text, sizeof(text)) : 0;
    ::close(file);
    const std::string line(text, std::max<ssize_t>(size, 0));
    return new std::string(line.empty() ? "unknown" : line.substr(0, line.find('\n')));
  }();
  return *id;
}

std::string death_of(c10d::ProcessGroup& group, const std::string& group_name, int rank) {
  GroupStore store(group, group_name, "look for rank " + std::to_string(rank));
  return death_of(group, group_name, rank, store);
}

std::string death_of(c10d::ProcessGroup& group, const std::string& group_name, int rank, GroupStore& store) {
  auto peer = known_peer(group, rank);
  if (!peer) {
    const std::string key = process_key(group_name, rank);
    if (!store.has(key)) {
      return "";  // the rank has not joined any meeting of this group, so its pid is not known
    }
    std::istringstream in(store.get(key));
    std::string host;
    ProcessId process;
    in >> host >> process.pid >> process.pid_namespace;
    peer = host == boot_id() ? Peer::of(process) : nullptr;
    remember_peer(group, rank, *peer);
  }
  return *peer && (*peer)->dead() ? "(pid " + std::to_string((*peer)->pid()) + ") is dead" : "";
}

Meeting::Meeting(c10d::ProcessGroup& group, const std::string& group_name, const std::string& purpose,
                 const std::string& tag, std::function<void()> idle)
    : group_(group),
      store_(group, group_name, purpose),
      rank_(group.getRank()),
      world_size_(group.getSize()),
      group_name_(group_name),
      idle_(std::move(idle)) {
  // The store counts the meetings, so that the count exists as long as the names in the store.
  const std::string all = "symm_overlap/" + purpose + "/" + group_name + "/" + tag + "/";
  number_ = store_.add(all + "count/" + std::to_string(rank_), 1);
  prefix_ = all + std::to_string(number_) + "/";
  attempt([&] { introduce(); });
}

void Meeting::introduce() {
  // Once the process of a rank is known, its death is noticed even before its next meeting.
  const ProcessId self = ProcessId::self();
  store_.set(process_key(group_name_, rank_),
             boot_id() + " " + std::to_string(self.pid) + " " + std::to_string(self.pid_namespace));
}

std::vector<std::string> Meeting::exchange(const std::string& round, const std::string& mine) {
  store_.set(key(round, rank_), mine);
  check_aborted();
  std::vector<std::string> all;
  for (int rank = 0; rank < world_size_; ++rank) {
    wait_for(round, rank);
    all.push_back(store_.get(key(round, rank)));
    (void)death_of(group_, group_name_, rank, store_);  // reads and remembers its process while the store is available
  }
  return all;
}

void Meeting::abort(const std::string& reason) noexcept {
  try {
    store_.set(prefix_ + "aborted", "rank " + std::to_string(rank_) + " failed: " + reason);
  } catch (const std::exception&) {
    // The store is gone. The other ranks notice that by themselves.
  }
}

void Meeting::check_aborted() {
  if (store_.has(prefix_ + "aborted")) {
    TORCH_CHECK_WITH(DistBackendError, false, store_.prologue(), store_.get(prefix_ + "aborted"));
  }
}

void Meeting::rethrow_aborted() {
  std::string reason;
  try {
    reason = store_.has(prefix_ + "aborted") ? store_.get(prefix_ + "aborted") : "";
  } catch (const c10::Error&) {
    return;
  }
  TORCH_CHECK_WITH(DistBackendError, reason.empty(), store_.prologue(), reason);
}

void Meeting::wait_for(const std::string& round, int rank) {
  // Poll instead of using Store::wait, which blocks the store for other threads, and they have meetings too.
  const std::chrono::milliseconds timeout(timeout_ms_or_default(0));
  const auto start = std::chrono::steady_clock::now();
  std::chrono::milliseconds looked_up{0};
  auto pause = kFirstPause;
  while (!store_.has(key(round, rank))) {
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
    check_aborted();
    TORCH_CHECK_WITH(
        DistBackendError, waited < timeout, store_.prologue(), "rank ", rank, " did not come to rank ", rank_, " (pid ",
        ::getpid(), ") within ", timeout.count() / 1000.0, " s",
        store_.has(process_key(group_name_, rank)) ? "" : " (whether it is alive is unknown: it never came before)",
        ". Every rank of the group must make the same calls, in the same order. To wait longer, set "
        "symm_overlap.timeout(seconds) or SYMM_OVERLAP_TIMEOUT.");
    if (waited >= looked_up + kLookUp) {
      looked_up = waited;
      idle_();
      look_for_dead(round, rank, waited.count() / 1000.0);
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

void Meeting::look_for_dead(const std::string& round, int first, double waited_s) {
  for (int rank = first; rank < world_size_; ++rank) {
    // Check for death first, then read the store: what a rank posted before it exited still counts.
    const std::string dead = death_of(group_, group_name_, rank, store_);
    TORCH_CHECK_WITH(DistBackendError, dead.empty() || store_.has(key(round, rank)), store_.prologue(), "rank ", rank,
                     " ", dead, " after ", waited_s, " s of waiting by rank ", rank_, " (pid ", ::getpid(),
                     "). Its own output says why it ended; this group cannot go on.");
  }
}

std::string Meeting::key(const std::string& round, int rank) const {
  return prefix_ + round + "/" + std::to_string(rank);
}

}  // namespace symm_overlap::cpu
