#include "cpu/rendezvous.h"

#include <c10/util/Exception.h>

#include <sstream>
#include <vector>

#include "cpu/known_peers.h"
#include "cpu/meeting.h"
#include "cpu/peer.h"

namespace symm_overlap::cpu {

namespace {

constexpr const char* kPurpose = "rendezvous";

// The data that a rank sends to its peers about its memory.
struct Announcement {
  std::string host;  // ranks of two hosts cannot map each other's memory
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
    TORCH_CHECK(!in.fail(), "symm_overlap: rendezvous: a rank announced '", text,
                "': do all ranks run the same version?");
    return a;
  }
};

// Every rank sees the same announcements, so either all ranks throw or none.
void check_alike(const std::vector<Announcement>& ranks, const std::string& group_name) {
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    TORCH_CHECK(ranks[rank].host == ranks[0].host, "symm_overlap: group '", group_name,
                "' spans hosts (rank 0 and rank ", rank,
                "): CPU symmetric memory needs all ranks on one host. The c10d path works across hosts.");
    TORCH_CHECK_VALUE(ranks[rank].buffer_bytes == ranks[0].buffer_bytes, "symm_overlap: rendezvous of group '",
                      group_name, "': rank 0 brought ", ranks[0].buffer_bytes, " bytes, rank ", rank, " brought ",
                      ranks[rank].buffer_bytes, ". A symmetric tensor has the same size on every rank.");
    TORCH_CHECK_VALUE(ranks[rank].pad_bytes == ranks[0].pad_bytes, "symm_overlap: rendezvous of group '", group_name,
                      "': rank 0 has a signal pad of ", ranks[0].pad_bytes, " bytes, rank ", rank, " one of ",
                      ranks[rank].pad_bytes, ". Call set_signal_pad_size alike on every rank.");
  }
}

RankMemory map(const Announcement& theirs, int peer, const std::string& group_name) {
  RankMemory memory{nullptr, nullptr, Peer::of(theirs.process)};
  try {
    memory.buffer = std::make_shared<SharedObject>(SharedObject::open(theirs.buffer));
    memory.control = std::make_shared<SharedObject>(SharedObject::open(theirs.control));
  } catch (const c10::Error&) {
    // A process that ends closes its files first. It is known to be dead when all of its threads have ended.
    TORCH_CHECK_WITH(DistBackendError, !memory.peer->dead(1000), "symm_overlap: rendezvous of group '", group_name,
                     "': rank ", peer, " (pid ", memory.peer->pid(),
                     ") is dead. Its own output says why it ended; this group cannot go on.");
    throw;
  }
  return memory;
}

}  // namespace

c10::intrusive_ptr<CpuSymmetricMemory> rendezvous_group(c10d::ProcessGroup& group, const std::string& group_name,
                                                        const std::string& tag, std::shared_ptr<SharedObject> buffer,
                                                        size_t buffer_bytes, const std::function<void()>& idle) {
  const int rank = group.getRank();
  const ControlLayout layout{group.getSize(), c10d::symmetric_memory::get_signal_pad_size()};
  Meeting meeting(group, group_name, kPurpose, tag, idle);

  std::shared_ptr<SharedObject> control;
  std::vector<Announcement> announced;
  meeting.attempt([&] {
    TORCH_CHECK_VALUE(layout.channels() > 0, "symm_overlap: a signal pad of ", layout.pad_bytes,
                      " bytes has no channel for ", layout.world_size, " ranks; call set_signal_pad_size(",
                      layout.world_size * sizeof(uint32_t), ") or more before the allocation");
    control = std::make_shared<SharedObject>(SharedObject::create(layout.bytes(), "a signal pad"));
    const Announcement mine{boot_id(),        ProcessId::self(), buffer_bytes,
                            layout.pad_bytes, buffer->address(), control->address()};
    for (const std::string& text : meeting.exchange("announce", mine.pack())) {
      announced.push_back(Announcement::unpack(text));
    }
  });
  check_alike(announced, group_name);

  std::vector<RankMemory> ranks;
  meeting.attempt([&] {
    for (int peer = 0; peer < layout.world_size; ++peer) {
      ranks.push_back(peer == rank ? RankMemory{buffer, control, Peer::of(announced[rank].process)}
                                   : map(announced[peer], peer, group_name));
    }
    meeting.exchange("mapped", "");
  });
  control->close_file();  // all ranks have mapped it; the file of the buffer stays open for other groups
  return c10::make_intrusive<CpuSymmetricMemory>(group_name, meeting.number(), rank, buffer_bytes, layout,
                                                 std::move(ranks));
}

void refuse_rendezvous(c10d::ProcessGroup& group, const std::string& group_name, const std::string& tag,
                       const std::string& reason) {
  // The peers notice a death by themselves. The dead process may have hosted the store; then, as long as a process that
  // was forked from it keeps its sockets open, a request is neither answered nor rejected.
  if (!dead_peers(group).empty()) {
    return;
  }
  Meeting(group, group_name, kPurpose, tag, [] {}).abort(reason);
}

}  // namespace symm_overlap::cpu
