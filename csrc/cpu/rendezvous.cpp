#include "cpu/rendezvous.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <vector>

#include "cpu/deadline.h"
#include "cpu/peer.h"

namespace symm_overlap::cpu {

namespace {

// What a rank tells its peers about its memory.
struct Announcement {
  std::string host; // ranks of two hosts cannot map each other's memory
  ProcessId process;
  size_t buffer_bytes = 0;
  size_t pad_bytes = 0;
  SharedObject::Address buffer;
  SharedObject::Address control;

  std::string pack() const {
    std::ostringstream out;
    out << host << ' ' << process.pid << ' ' << process.pid_namespace << ' ' << buffer_bytes << ' ' << pad_bytes;
    for (const auto& address : {buffer, control}) {
      out << ' ' << address.fd << ' ' << address.device << ' ' << address.inode << ' ' << address.bytes;
    }
    return out.str();
  }
  static Announcement unpack(const std::string& text) {
    Announcement a;
    std::istringstream in(text);
    in >> a.host >> a.process.pid >> a.process.pid_namespace >> a.buffer_bytes >> a.pad_bytes;
    for (auto* address : {&a.buffer, &a.control}) {
      in >> address->fd >> address->device >> address->inode >> address->bytes;
      address->pid = a.process.pid;
    }
    TORCH_CHECK(!in.fail(), "symm_overlap: rendezvous: a rank announced '", text, "': do all ranks run the same version?");
    return a;
  }
};

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id.empty() ? "unknown" : id;
}

// One rank's turn-taking with its peers through the store: every rank posts a text in each round and reads everyone's.
class Rounds {
 public:
  Rounds(c10d::ProcessGroup& group, const std::string& group_name)
      : store_(group.getStore()), rank_(group.getRank()), world_size_(group.getSize()), group_name_(group_name) {
    // The store itself counts this rank's rendezvous: the n-th of one rank meets the n-th of the others.
    const std::string counter = "symm_overlap/rendezvous/" + group_name + "/" + std::to_string(rank_);
    prefix_ = "symm_overlap/rendezvous/" + group_name + "/" + std::to_string(store_->add(counter, 1)) + "/";
  }

  std::vector<std::string> exchange(const std::string& round, const std::string& mine) {
    store_->set(key(round, rank_), std::vector<uint8_t>(mine.begin(), mine.end()));
    std::vector<std::string> all;
    for (int rank = 0; rank < world_size_; ++rank) {
      wait_for(round, rank);
      const std::vector<uint8_t> text = store_->get(key(round, rank));
      all.emplace_back(text.begin(), text.end());
    }
    return all;
  }

 private:
  std::string key(const std::string& round, int rank) const {
    return prefix_ + round + "/" + std::to_string(rank);
  }

  void wait_for(const std::string& round, int rank) {
    const std::chrono::milliseconds timeout(timeout_ms_or_default(0));
    const auto start = std::chrono::steady_clock::now();
    while (!store_->check({key(round, rank)})) {
      const auto waited = std::chrono::steady_clock::now() - start;
      TORCH_CHECK_WITH(
          DistBackendError,
          waited < timeout,
          "symm_overlap: rendezvous of group '", group_name_, "': rank ", rank, " did not come to rank ", rank_, " (pid ", ::getpid(),
          ") within ", timeout.count() / 1000.0, " s. Every rank of the group must allocate and call rendezvous, in the same order.");
      const auto slice = std::min<std::chrono::nanoseconds>(timeout - waited, std::chrono::seconds(1));
      try {
        store_->wait({key(round, rank)}, std::chrono::duration_cast<std::chrono::milliseconds>(slice) + std::chrono::milliseconds(1));
      } catch (const c10::DistStoreError&) {
        // Not there within this slice; the loop looks at the deadline.
      }
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int world_size_;
  std::string group_name_;
  std::string prefix_;
};

// Every rank sees the same announcements, so all of them throw, or none.
void check_alike(const std::vector<Announcement>& ranks, const std::string& group_name) {
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    TORCH_CHECK(
        ranks[rank].host == ranks[0].host,
        "symm_overlap: group '", group_name, "' spans hosts (rank 0 and rank ", rank,
        "): CPU symmetric memory needs all ranks on one host. The c10d path works across hosts.");
    TORCH_CHECK_VALUE(
        ranks[rank].buffer_bytes == ranks[0].buffer_bytes,
        "symm_overlap: rendezvous of group '", group_name, "': rank 0 brought ", ranks[0].buffer_bytes, " bytes, rank ", rank,
        " brought ", ranks[rank].buffer_bytes, ". A symmetric tensor has the same size on every rank.");
    TORCH_CHECK_VALUE(
        ranks[rank].pad_bytes == ranks[0].pad_bytes,
        "symm_overlap: rendezvous of group '", group_name, "': rank 0 has a signal pad of ", ranks[0].pad_bytes, " bytes, rank ", rank,
        " one of ", ranks[rank].pad_bytes, ". Call set_signal_pad_size alike on every rank.");
  }
}

void check_all_mapped(const std::vector<std::string>& failures, const std::string& group_name) {
  for (size_t rank = 0; rank < failures.size(); ++rank) {
    TORCH_CHECK(
        failures[rank].empty(), "symm_overlap: rendezvous of group '", group_name, "': rank ", rank, " failed: ", failures[rank]);
  }
}

} // namespace

c10::intrusive_ptr<CpuSymmetricMemory> rendezvous_group(
    c10d::ProcessGroup& group,
    const std::string& group_name,
    std::shared_ptr<SharedObject> buffer,
    size_t buffer_bytes) {
  const int rank = group.getRank();
  const ControlLayout layout{group.getSize(), c10d::symmetric_memory::get_signal_pad_size()};
  TORCH_CHECK_VALUE(
      layout.channels() > 0,
      "symm_overlap: a signal pad of ", layout.pad_bytes, " bytes has no channel for ", layout.world_size, " ranks; call set_signal_pad_size(",
      layout.world_size * sizeof(uint32_t), ") or more before the allocation");
  Rounds rounds(group, group_name);

  // A rank that cannot take part still posts in each round: its peers learn why instead of waiting.
  std::string failure;
  std::shared_ptr<SharedObject> control;
  Announcement mine{boot_id(), ProcessId::self(), buffer_bytes, layout.pad_bytes, buffer->address(), {}};
  try {
    control = std::make_shared<SharedObject>(SharedObject::create(layout.bytes(), "a signal pad"));
    mine.control = control->address();
  } catch (const std::exception& error) {
    failure = error.what();
  }

  std::vector<Announcement> announced;
  for (const std::string& text : rounds.exchange("announce", mine.pack())) {
    announced.push_back(Announcement::unpack(text));
  }
  check_alike(announced, group_name);

  std::vector<RankMemory> ranks;
  try {
    for (int peer = 0; peer < layout.world_size && failure.empty(); ++peer) {
      const Announcement& theirs = announced[peer];
      if (theirs.control.fd < 0) {
        break; // that rank failed, and will say why
      }
      auto map = [](const SharedObject::Address& address) {
        return std::make_shared<SharedObject>(SharedObject::open(address));
      };
      ranks.push_back(
          {peer == rank ? buffer : map(theirs.buffer), peer == rank ? control : map(theirs.control), Peer(theirs.process)});
    }
  } catch (const std::exception& error) {
    failure = error.what();
  }
  check_all_mapped(rounds.exchange("mapped", failure), group_name);
  return c10::make_intrusive<CpuSymmetricMemory>(group_name, rank, buffer_bytes, layout, std::move(ranks));
}

} // namespace symm_overlap::cpu
