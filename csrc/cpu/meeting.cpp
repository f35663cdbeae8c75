#include "cpu/meeting.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>

#include "cpu/deadline.h"
#include "cpu/peer.h"

namespace symm_overlap::cpu {

namespace {

constexpr std::chrono::microseconds kFirstPause{50};
constexpr std::chrono::microseconds kLongestPause{20'000};
constexpr std::chrono::milliseconds kLookUp{100};  // how often a wait asks whether its peer lives

std::string process_key(const std::string& group_name, int rank) {
  return "symm_overlap/process/" + group_name + "/" + std::to_string(rank);
}

}  // namespace

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id.empty() ? "unknown" : id;
}

std::string death_of(c10d::ProcessGroup& group, const std::string& group_name, int rank) {
  const auto store = group.getStore();
  const std::string key = process_key(group_name, rank);
  if (!store->check({key})) {
    return "";  // it has not been to any meeting of this group, so its pid is not known
  }
  const std::vector<uint8_t> text = store->get(key);
  std::istringstream in(std::string(text.begin(), text.end()));
  std::string host;
  ProcessId process;
  in >> host >> process.pid >> process.pid_namespace;
  const bool dead = host == boot_id() && Peer::of(process)->dead();
  return dead ? "(pid " + std::to_string(process.pid) + ") is dead" : "";
}

Meeting::Meeting(c10d::ProcessGroup& group, const std::string& group_name, const std::string& purpose,
                 const std::string& tag, std::function<void()> idle)
    : group_(group),
      store_(group.getStore()),
      rank_(group.getRank()),
      world_size_(group.getSize()),
      group_name_(group_name),
      purpose_(purpose),
      idle_(std::move(idle)) {
  // Once known, a rank that dies before its next meeting is noticed too.
  const ProcessId self = ProcessId::self();
  set(process_key(group_name, rank_),
      boot_id() + " " + std::to_string(self.pid) + " " + std::to_string(self.pid_namespace));
  // The store itself counts the meetings: it lives as long as the names in it.
  const std::string all = "symm_overlap/" + purpose + "/" + group_name + "/" + tag + "/";
  number_ = store_->add(all + "count/" + std::to_string(rank_), 1);
  prefix_ = all + std::to_string(number_) + "/";
}

std::vector<std::string> Meeting::exchange(const std::string& round, const std::string& mine) {
  set(key(round, rank_), mine);
  check_aborted();
  std::vector<std::string> all;
  for (int rank = 0; rank < world_size_; ++rank) {
    wait_for(round, rank);
    all.push_back(get(key(round, rank)));
  }
  return all;
}

void Meeting::abort(const std::string& reason) noexcept {
  try {
    set(prefix_ + "aborted", "rank " + std::to_string(rank_) + " failed: " + reason);
  } catch (const std::exception&) {
    // The store is gone: the others notice that by themselves.
  }
}

void Meeting::check_aborted() {
  if (store_->check({prefix_ + "aborted"})) {
    TORCH_CHECK_WITH(DistBackendError, false, prologue(), get(prefix_ + "aborted"));
  }
}

void Meeting::wait_for(const std::string& round, int rank) {
  // Asking again and again, and not Store::wait: that keeps the store to itself, and other threads have meetings too.
  const std::chrono::milliseconds timeout(timeout_ms_or_default(0));
  const auto start = std::chrono::steady_clock::now();
  std::chrono::milliseconds looked_up{0};
  auto pause = kFirstPause;
  while (!store_->check({key(round, rank)})) {
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
    check_aborted();
    TORCH_CHECK_WITH(
        DistBackendError, waited < timeout, prologue(), "rank ", rank, " did not come to rank ", rank_, " (pid ",
        ::getpid(), ") within ", timeout.count() / 1000.0, " s",
        store_->check({process_key(group_name_, rank)}) ? "" : " (whether it lives is not known: it never came before)",
        ". Every rank of the group must make the same calls, in the same order. A longer deadline: "
        "symm_overlap.timeout(seconds) or SYMM_OVERLAP_TIMEOUT.");
    if (waited >= looked_up + kLookUp) {
      looked_up = waited;
      idle_();
      for (int other = rank; other < world_size_; ++other) {
        // Dead first, then the store: what a rank posted before it exited still counts.
        const std::string dead = death_of(group_, group_name_, other);
        TORCH_CHECK_WITH(DistBackendError, dead.empty() || store_->check({key(round, other)}), prologue(), "rank ",
                         other, " ", dead, " after ", waited.count() / 1000.0, " s of waiting by rank ", rank_,
                         " (pid ", ::getpid(), "). Its own output says why it ended; this group cannot go on.");
      }
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

std::string Meeting::prologue() const {
  return "symm_overlap: " + purpose_ + " of group '" + group_name_ + "': ";
}

std::string Meeting::key(const std::string& round, int rank) const {
  return prefix_ + round + "/" + std::to_string(rank);
}

std::string Meeting::get(const std::string& key) {
  const std::vector<uint8_t> text = store_->get(key);
  return {text.begin(), text.end()};
}

void Meeting::set(const std::string& key, const std::string& text) {
  store_->set(key, std::vector<uint8_t>(text.begin(), text.end()));
}

}  // namespace symm_overlap::cpu
