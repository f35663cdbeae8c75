// Tests csrc/common/host_lane.h. Some threads are streams, which carry out memory operations, and others are hosts. The
// argument names the case to run. Exit code 0 means that the case passed.
#include <map>
#include <string>

#include "host_ranks.h"

void watched();  // host_watch.cpp
void exit_while_waiting();
void mismatch();  // host_calls.cpp
void barrier();
void hearsay();
void no_false_mismatch();

// In each round, every rank rewrites plain memory and reads that of every other rank, while the hosts check the lanes.
// The last kernel of each call finds all ranks in the same call.
void exchange() {
  constexpr int kWorld = 3, kRounds = 150;
  Ranks ranks(kWorld, 3);
  std::vector<int> values(kWorld);
  const Looking looking(ranks);
  run(kWorld, [&](int rank) {
    const auto peers = others(kWorld, rank);
    for (int round = 0; round < kRounds; ++round) {
      const Call call = lasting(kLong, 1000 + round % 5, 0xFFFFFFC0u + round);  // call numbers wrap meanwhile
      values[rank] = round;
      ranks.carry_out(ranks[rank].signal(call, peers, 0));
      ranks.carry_out(ranks[rank].wait(call, peers, 0));
      for (const int peer : peers) REQUIRE(values[peer] == round);
      ranks.carry_out(ranks[rank].signal(call, peers, 2));  // [read] they may be overwritten
      ranks.carry_out(ranks[rank].wait(call, peers, 2));
      REQUIRE(!ranks.fails_at_the_end(rank, call, peers));
    }
  });
  for (int rank = 0; rank < kWorld; ++rank) REQUIRE(!ranks[rank].failure() && ranks[rank].idle());
}

// Comparisons are right when an epoch wraps in a slot, and when it wraps between the value of a slot and the awaited
// value.
void wrap() {
  Ranks ranks(2, 1);
  for (const uint32_t before : {0xFFFFFFFEu, 0x7FFFFFFEu}) {
    ranks.word(0, ranks.block.slot(1, 0)) = before;
    MemoryOperations operations{{MemoryOperation::kWait32, 0, ranks.block.slot(1, 0), before - 5},
                                {MemoryOperation::kWrite32, 0, ranks.block.slot(1, 0), before + 7},
                                {MemoryOperation::kWait32, 0, ranks.block.slot(1, 0), before + 3}};
    ranks.carry_out(operations);
  }
  ranks.word(0, ranks.block.slot(1, 0)) = 0xFFFFFFFFu;
  (void)ranks[0].wait(lasting(1), {1}, 0);  // waits for epoch 1, two epochs after the slot's value
  REQUIRE(!ranks[0].idle());
  ranks.word(0, ranks.block.slot(1, 0)) = 2;
  REQUIRE(ranks[0].idle());
}

// The deadline of a wait counts from the moment when the stream reaches the wait. If a wait for several peers fails,
// the record names the peer whose signal is missing.
void timeout() {
  Ranks ranks(3, 4);
  ranks.advance(6);
  const Call call = lasting(kSoon);
  const auto start = Clock::now();
  ranks.carry_out(ranks[0].signal(call, {1}, 3));
  const auto operations = ranks[1].wait(call, {0, 2}, 3);
  for (int look = 0; look < 20; ++look) ranks[1].look(start + milliseconds(100 * look), nobody);
  REQUIRE(!ranks[1].failure() && !ranks[1].idle());  // the stream has not reached the wait
  std::thread stream([&] { ranks.carry_out(operations); });
  const uint32_t* reached = &ranks.word(1, ranks.block.reached(0, 3));
  while (__atomic_load_n(reached, __ATOMIC_ACQUIRE) != 7) std::this_thread::yield();
  ranks[1].look(start + milliseconds(5000), nobody);
  ranks[1].look(start + milliseconds(5049), nobody);
  REQUIRE(!ranks[1].failure());
  ranks[1].look(start + milliseconds(5050), nobody);
  stream.join();
  REQUIRE(ranks.fails(1, kTimedOut, 2));
  const auto failure = ranks[1].failure();
  REQUIRE(failure->channel == 3 && failure->expected == 7 && failure->found == 6);
  REQUIRE(ranks.word(0, ranks.block.notice()) == 1 + 1 && ranks.word(2, ranks.block.notice()) == 1 + 1);
  REQUIRE(ranks.word(1, ranks.block.gone(0)) == kLaneFailed && !ranks[1].idle());
  REQUIRE(ranks[1].wait(call, {0}, 0).empty());  // later waits do not wait
}

// Late signals may lower a word that the host has raised to a later epoch. They do not block the stream for long.
void late_signals() {
  Ranks ranks(2, 1);
  const Call call = lasting(1);
  MemoryOperations signals, waits;
  for (int i = 0; i < 4; ++i) {
    for (const auto& each : ranks[1].signal(call, {0}, 0)) signals.push_back(each);
    for (const auto& each : ranks[0].wait(call, {1}, 0)) waits.push_back(each);
  }
  ranks[0].give_up(call);
  signals.pop_back();                                        // the last signal never arrives
  for (const auto& each : signals) ranks.carry_out({each});  // each signal lowers the word
  REQUIRE(ranks.word(0, ranks.block.slot(1, 0)) == 3);
  const Looking looking(ranks);
  std::thread stream([&] { ranks.carry_out(waits); });
  stream.join();
  REQUIRE(ranks.fails(0, kGaveUp, 0));
}

// The host does not overwrite a signal whose epoch is later than the epoch to which the host would raise the word.
// Other words are raised at once.
void ahead() {
  Ranks ranks(2, 2);
  (void)ranks[0].wait(lasting(1), {1}, 0);
  (void)ranks[0].wait(lasting(1), {1}, 1);
  ranks.word(0, ranks.block.slot(1, 0)) = 9;
  ranks[0].give_up(lasting(1));
  REQUIRE(ranks.word(0, ranks.block.slot(1, 0)) == 9 && ranks.word(0, ranks.block.slot(1, 1)) == 1);
}

// One rank gives up early. The others have long deadlines and wait on another channel. The rank that gives up ends
// their waits, and their records name it.
void told() {
  Ranks ranks(4, 2);
  std::vector<MemoryOperations> waits;
  for (int rank = 0; rank < 4; ++rank) {
    waits.push_back(ranks[rank].wait(lasting(rank == 2 ? kSoon : kLong), {(rank + 1) % 4}, rank == 2 ? 1 : 0));
  }
  const Looking looking(ranks);
  run(4, [&](int rank) { ranks.carry_out(waits[rank]); });
  for (int rank = 0; rank < 4; ++rank) {
    REQUIRE(ranks.fails(rank, rank == 2 ? kTimedOut : kPeerFailed, rank == 2 ? 3 : 2));
  }
}

// Rank 0 signals although its own wait was ended without a signal. Rank 2 passes a wait because of this signal. Before
// its call ends, it finds that the call has failed.
void poison() {
  for (int trial = 0; trial < 100; ++trial) {
    Ranks ranks(3, 1);
    const Looking looking(ranks);
    run(3, [&](int rank) {
      if (rank == 0) {
        ranks.carry_out(ranks[0].wait(lasting(1), {1}, 0));  // rank 1 never signals, so rank 0 sends garbage
        ranks.carry_out(ranks[0].signal(lasting(1), {2}, 0));
      }
      if (rank == 2) {
        ranks.carry_out(ranks[2].wait(lasting(kLong), {0}, 0));
        REQUIRE(call_failed(ranks.lane(2), lasting(kLong)));
      }
    });
    REQUIRE(call_failed(ranks.lane(0), lasting(1)));
    REQUIRE(ranks.records[0].reason == kNoFailure);  // the host has the record
  }
}

// Rank 2 has died. Waits for its signals that have arrived pass. The next wait for it fails at once, and the other
// ranks are notified.
void death() {
  Ranks ranks(3, 2);
  const auto died = [](int rank) { return rank == 2; };
  const Call call = lasting(kLong);
  ranks.carry_out(ranks[2].signal(call, {0}, 0));
  ranks.carry_out(ranks[0].wait(call, {2}, 0));
  ranks[0].look(Clock::now(), died);
  REQUIRE(!ranks[0].failure() && ranks.word(0, ranks.block.gone(2)) == kDied &&
          ranks.word(0, ranks.block.gone(1)) == 0);
  (void)ranks[0].wait(call, {2, 1}, 1);  // rank 2's signal arrives, and rank 1's signal still may
  ranks.carry_out(ranks[2].signal(call, {0}, 1));
  ranks[0].look(Clock::now(), died);
  REQUIRE(!ranks[0].failure());
  ranks.carry_out(ranks[1].signal(call, {0}, 1));
  const MemoryOperations waits[2] = {ranks[0].wait(call, {1, 2}, 1), ranks[1].wait(call, {0, 2}, 1)};
  const Looking looking(ranks, died);
  run(2, [&](int rank) { ranks.carry_out(waits[rank]); });
  int found = 0;
  for (int rank = 0; rank < 2; ++rank) {
    found += ranks.fails(rank, kPeerDied, 2);
    REQUIRE(ranks.fails(rank, kPeerDied, 2) || ranks.fails(rank, kPeerFailed, 1 - rank));
  }
  REQUIRE(found > 0);
}

// A peer is marked as dead right after its last signal. The host does not overlook this signal.
void last_signal() {
  for (int trial = 0; trial < 200; ++trial) {
    Ranks ranks(2, 1);
    std::atomic<bool> ended{false};
    const Looking looking(ranks, [&](int rank) { return rank == 1 && ended; });
    run(2, [&](int rank) {
      if (rank == 0) ranks.carry_out(ranks[0].wait(lasting(kLong), {1}, 0));
      if (rank == 1) ranks.carry_out(ranks[1].signal(lasting(kLong), {0}, 0)), ended = true;
    });
    REQUIRE(!ranks[0].failure());
  }
}

// The host notifies the kernels of captured calls of failures, and these kernels notify the host.
void kernels() {
  Ranks ranks(3, 1);
  const Call captured{3, 5, kLong, kNoAnnouncement};
  std::thread replay([&] { await_signal(ranks.lane(0), captured, 1, 0); });
  ranks[0].give_up(captured);
  replay.join();
  REQUIRE(ranks.fails(0, kGaveUp, 0) && ranks.records[0].reason == kNoFailure);

  Ranks dead(2, 1);
  std::thread left([&] { await_signal(dead.lane(0), captured, 1, 0); });
  dead[0].look(Clock::now(), [](int) { return true; });
  left.join();
  REQUIRE(dead.records[0].reason == kPeerDied && dead.records[0].peer == 1);

  Ranks late(3, 2);
  const MemoryOperations waits[2] = {late[1].wait(lasting(kLong), {0}, 1), late[2].wait(lasting(kLong), {0}, 1)};
  const Looking looking(late);
  run(3, [&](int rank) {
    if (rank == 0) await_signal(late.lane(0), Call{3, 5, kSoon, kNoAnnouncement}, 1, 0);
    if (rank > 0) late.carry_out(waits[rank - 1]);
  });
  REQUIRE(late.records[0].reason == kTimedOut && !late[0].failure());
  REQUIRE(late.fails(1, kPeerFailed, 0) && late.fails(2, kPeerFailed, 0));
}

// A call waits in a kernel. The host checks the lane until the last launch of the call has run. If the process ends
// before that, the host ends the wait.
void one_launch() {
  Ranks ranks(2, 1);
  const Call call = lasting(kLong);
  for (uint32_t end = 1; end <= 2; ++end) {
    ranks[0].launched(call, end);
    REQUIRE(!ranks[0].idle());
    ranks.records[0].ended = end;
    REQUIRE(ranks[0].idle());
  }
  REQUIRE(!ranks[0].end() && !ranks[0].failure());

  Ranks ending(2, 1);
  ending[0].launched(call, 1);
  std::thread kernel([&] { await_signal(ending.lane(0), call, 1, 0); });
  REQUIRE(ending[0].end());
  kernel.join();  // ends long before its deadline
  REQUIRE(ending.fails(0, kGaveUp, 0));
  REQUIRE(ending.word(1, ending.block.notice()) == 1);  // the peer is notified
}

// A kernel waits for a peer that is in another call, in which the peer signals by memory operations.
void elsewhere() {
  Ranks ranks(2, 1);
  const Call mine = lasting(kLong, 7, 4), theirs = lasting(kLong, 8, 4);
  ranks.carry_out(ranks[1].signal(theirs, {0}, 0));
  await_signal(ranks.lane(0), mine, 1, 0);
  REQUIRE(ranks.records[0].reason == kMismatch && ranks.records[0].peer == 1 && ranks.records[0].found == 4);
  ranks[0].look(Clock::now(), nobody);
  REQUIRE(ranks.word(1, ranks.block.notice()) == 1);  // the host notifies the peer's host
}

int main(int, char** argv) {
  const std::map<std::string, void (*)()> cases{{"exchange", exchange},     {"wrap", wrap},
                                                {"timeout", timeout},       {"late signals", late_signals},
                                                {"ahead", ahead},           {"told", told},
                                                {"poison", poison},         {"death", death},
                                                {"kernels", kernels},       {"mismatch", mismatch},
                                                {"hearsay", hearsay},       {"last signal", last_signal},
                                                {"barrier", barrier},       {"no mismatch", no_false_mismatch},
                                                {"watched", watched},       {"exit", exit_while_waiting},
                                                {"one launch", one_launch}, {"elsewhere", elsewhere}};
  cases.at(argv[1])();
}
