// Tests csrc/common/watch.h: the thread that checks the lanes, and the end of a process.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/watch.h"
#include "host_ranks.h"

// The watch checks lanes without being called. It releases a lane that waits for nothing, and keeps a lane that waits.
void watched() {
  Ranks ranks(2, 1);
  Watch& watch = Watch::of_this_process();
  std::atomic<bool> ended{false};
  for (auto& lane : ranks.lanes) watch.look_after(lane, [&](int rank) { return rank == 1 && ended; });
  const auto waits = ranks[0].wait(lasting(kLong), {1}, 0);
  REQUIRE(watch.leave(ranks.lanes[1]) && !watch.leave(ranks.lanes[0]));
  std::thread stream([&] { ranks.carry_out(waits); });
  const auto start = Clock::now();
  ended = true;
  stream.join();
  REQUIRE(Clock::now() - start < std::chrono::seconds(1) && ranks.fails(0, kPeerDied, 1));
  REQUIRE(!watch.leave(ranks.lanes[0]));
  std::_Exit(0);  // the watch still uses objects on this stack
}

// A lane whose record and blocks are in memory that CUDA frees. If the ranks are `together` in one process, the blocks
// of all ranks are there. Otherwise only this rank's block is. `shared`: the block of the peer, if the hosts share
// blocks. The lane then assumes that the blocks stay until the process has ended.
struct InMemoryOfCuda {
  explicit InMemoryOfCuda(bool together, uint32_t* shared = nullptr)
      : blocks{own, together ? own + block.words() : shared},
        lane(std::make_shared<HostLane>(block, 0, blocks, shared != nullptr, record)) {}

  ControlBlock block{2, 1};
  size_t bytes = sizeof(FailureRecord) + 2 * block.words() * sizeof(uint32_t);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  FailureRecord* record = new (memory) FailureRecord{};
  uint32_t* own = reinterpret_cast<uint32_t*>(record + 1);
  std::vector<uint32_t*> blocks;
  std::shared_ptr<HostLane> lane;
};

Ranks *exiting = nullptr, *idle = nullptr;
InMemoryOfCuda *resting = nullptr, *sharing = nullptr, *failed = nullptr, *together = nullptr;
std::thread* waiting = nullptr;
pid_t rank_process = 0;

// Does what CUDA does when a process ends: waits for the streams, and frees memory. Like CUDA's own function, it was
// registered before any lane was created.
void end_of_cuda() {
  if (::getpid() != rank_process) std::_Exit(exiting->word(1, exiting->block.notice()) == 0 ? 0 : 2);
  waiting->join();
  REQUIRE(exiting->fails(0, kGaveUp, 0) && exiting->word(1, exiting->block.notice()) == 1);
  REQUIRE(!(*idle)[0].failure());  // this lane waited for nothing, but a wait that begins now fails
  REQUIRE((*idle)[0].wait(lasting(kLong), {1}, 0).empty() && idle->fails(0, kGaveUp, 0));
  REQUIRE(idle->word(1, idle->block.notice()) == 1);
  for (const InMemoryOfCuda* each : {resting, sharing, failed, together}) ::munmap(each->memory, each->bytes);
  const size_t slot = exiting->block.slot(1, 0);
  exiting->carry_out({{MemoryOperation::kWrite32, 0, slot, 0}});  // a late signal
  std::this_thread::sleep_for(3 * Watch::kBetweenLooks);
  std::_Exit(__atomic_load_n(&exiting->word(0, slot), __ATOMIC_ACQUIRE) == 1 ? 0 : 1);
}

// If a process ends while a stream waits, it ends the wait and notifies the peers. A process forked from it does
// neither.
void exit_while_waiting() {
  rank_process = ::getpid();
  std::atexit(end_of_cuda);
  exiting = new Ranks(2, 1);
  idle = new Ranks(2, 1);
  resting = new InMemoryOfCuda(false), sharing = new InMemoryOfCuda(false, idle->host[1].data());
  failed = new InMemoryOfCuda(false), together = new InMemoryOfCuda(true);
  for (InMemoryOfCuda* each : {failed, together}) {
    each->record->reason = kTimedOut;
    each->lane->look(Clock::now(), nobody);
    REQUIRE(!each->lane->idle());
  }
  REQUIRE(resting->lane->idle() && sharing->lane->idle());
  for (const auto& each : {exiting, idle}) Watch::of_this_process().look_after(each->lanes[0], nobody);
  for (const auto& each : {resting, sharing, failed, together}) Watch::of_this_process().look_after(each->lane, nobody);
  const auto waits = (*exiting)[0].wait(lasting(kLong), {1}, 0);
  const pid_t fork = ::fork();
  if (fork == 0) {
    if (Watch::of_this_process().leave(idle->lanes[0])) std::_Exit(3);
    std::exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(fork, &status, 0) == fork && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  waiting = new std::thread([waits] { exiting->carry_out(waits); });
  std::exit(0);
}
