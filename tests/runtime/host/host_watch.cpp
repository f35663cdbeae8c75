// csrc/common/watch.h: the thread that looks, and the end of a process.
#include <sys/wait.h>
#include <unistd.h>

#include "common/watch.h"
#include "host_ranks.h"

// The watch looks by itself, lets a lane go that waits for nothing, and keeps one that does.
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
  std::_Exit(0);  // the watch goes on with what is on this stack
}

Ranks *exiting = nullptr, *idle = nullptr;
std::thread* waiting = nullptr;
pid_t rank_process = 0;

// As CUDA's own end, which was registered before any lane was made: it waits for the streams.
void end_of_cuda() {
  if (::getpid() != rank_process) std::_Exit(exiting->word(1, exiting->block.notice()) == 0 ? 0 : 2);
  waiting->join();
  const bool idle_goes_on = !(*idle)[0].failure();  // it waits for nothing
  std::_Exit(exiting->fails(0, kGaveUp, 0) && exiting->word(1, exiting->block.notice()) == 1 && idle_goes_on ? 0 : 1);
}

// A process that ends while a stream waits ends the wait, and tells the peers. A process forked from it does neither.
void exit_while_waiting() {
  rank_process = ::getpid();
  std::atexit(end_of_cuda);
  exiting = new Ranks(2, 1);
  idle = new Ranks(2, 1);
  for (Ranks* ranks : {exiting, idle}) Watch::of_this_process().look_after(ranks->lanes[0], nobody);
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
