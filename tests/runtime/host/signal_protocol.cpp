// Tests the signal protocol of csrc/cuda/signal.cuh with threads as GPUs. The argument names the case to run. Exit code
// 0 means that the case passed.
#define __device__
#include "cuda/signal.cuh"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

using namespace symm_overlap;
using namespace symm_overlap::cuda;

#define REQUIRE(what) \
  if (!(what)) std::printf("line %d: not so: %s\n", __LINE__, #what), std::exit(1)

constexpr uint64_t kSoon = 50'000'000, kLong = 60'000'000'000;  // nanoseconds

const Call kSilent{0, 0, kLong, kNoAnnouncement};

struct Ranks {
  ControlBlock block;
  std::vector<std::vector<uint32_t>> control, host;
  std::vector<uint64_t> peers;
  std::vector<FailureRecord> records;

  Ranks(int world, int channels) : block{world, channels}, records(world) {
    for (int rank = 0; rank < world; ++rank) control.emplace_back(block.words()), host.emplace_back(block.words());
    for (auto& words : control) peers.push_back(reinterpret_cast<uint64_t>(words.data()));
  }
  Lane lane(int rank) {
    return Lane{control[rank].data(), peers.data(), &records[rank], host[rank].data(), block, rank};
  }
  // Does what the host of `rank` does when it finds that the process of `peer` has ended.
  void mark_dead(int rank, int peer) { store_release_system(host[rank].data() + block.gone(peer), kDied); }
  bool failed(int rank) { return load_acquire_system(&records[rank].reason) != kNoFailure; }
  // Brings all ranks to the state after `epochs` signals between all of them have been sent and awaited.
  void advance(uint32_t epochs) {
    for (auto& words : control) {
      for (int rank = 0; rank < block.world; ++rank) {
        for (int channel = 0; channel < block.channels; ++channel) {
          words[block.slot(rank, channel)] = words[block.sent(rank, channel)] = words[block.awaited(rank, channel)] =
              epochs;
        }
      }
    }
  }
};

template <typename Rank>
void run(int world, Rank rank_main) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) threads.emplace_back(rank_main, rank);
  for (auto& thread : threads) thread.join();
}

// In each round, every rank rewrites plain memory and reads that of every other rank. With a thread sanitizer, this
// also shows that signals and waits order the accesses.
void exchange() {
  constexpr int kWorld = 3, kRounds = 200;
  Ranks ranks(kWorld, 3);
  ranks.advance(0xFFFFFF80u);  // epochs wrap during the test
  std::vector<int> values(kWorld);
  run(kWorld, [&](int rank) {
    const Lane lane = ranks.lane(rank);
    for (int round = 0; round < kRounds; ++round) {
      const Call call{0, 0, kLong, announcement(1000 + round % 5, 0xFFFFFFF0u + round)};  // call numbers wrap too
      values[rank] = round;
      for (int peer = 0; peer < kWorld; ++peer) {
        if (peer != rank) send_signal(lane, call, peer, 0);
      }
      for (int peer = 0; peer < kWorld; ++peer) {
        if (peer == rank) continue;
        await_signal(lane, call, peer, 0);
        REQUIRE(values[peer] == round);
        send_signal(lane, call, peer, 2);  // [read] it may be overwritten
      }
      for (int peer = 0; peer < kWorld; ++peer) {
        if (peer != rank) await_signal(lane, call, peer, 2);
      }
    }
  });
  for (int rank = 0; rank < kWorld; ++rank) REQUIRE(!ranks.failed(rank));
}

void timeout() {
  Ranks ranks(3, 4);
  ranks.advance(6);
  await_signal(ranks.lane(1), Call{5, 17, kSoon, kNoAnnouncement}, 2, 3);
  const FailureRecord& record = ranks.records[1];
  REQUIRE(record.reason == kTimedOut && record.op == 5 && record.call == 17 && record.peer == 2 && record.channel == 3);
  REQUIRE(record.expected == 7 && record.found == 6);
  // The record of the first failure stays. Later waits return at once, and their epochs are still counted.
  const int64_t start = global_nanoseconds();
  await_signal(ranks.lane(1), Call{6, 18, kLong, kNoAnnouncement}, 0, 0);
  await_signal(ranks.lane(1), Call{6, 19, kLong, kNoAnnouncement}, 0, 0);
  REQUIRE(global_nanoseconds() - start < 1'000'000'000);
  REQUIRE(record.op == 5 && record.peer == 2);
  REQUIRE(ranks.control[1][ranks.block.awaited(0, 0)] == 8);
}

// The waits of several streams of one rank fail at the same moment. One stream writes the whole record.
void race() {
  for (int trial = 0; trial < 100; ++trial) {
    Ranks ranks(5, 5);
    run(4, [&](int stream) {
      const uint32_t number = stream + 1;
      await_signal(ranks.lane(0), Call{number, number, 100'000, kNoAnnouncement}, number, number);
    });
    const FailureRecord& record = ranks.records[0];
    REQUIRE(record.reason == kTimedOut && record.op >= 1);
    REQUIRE(record.call == record.op && record.peer == record.op && record.channel == record.op);
  }
}

// One rank gives up early. The others have long deadlines and wait on another channel. The rank that gives up ends
// their waits.
void told() {
  Ranks ranks(4, 2);
  run(4, [&](int rank) {
    const bool first = rank == 2;
    await_signal(ranks.lane(rank), Call{uint32_t(rank), 1, first ? kSoon : kLong, kNoAnnouncement}, (rank + 1) % 4,
                 first ? 1 : 0);
  });
  for (int rank = 0; rank < 4; ++rank) {
    const FailureRecord& record = ranks.records[rank];
    REQUIRE(record.op == static_cast<uint32_t>(rank));
    REQUIRE(record.reason == (rank == 2 ? kTimedOut : kPeerFailed));
    REQUIRE(record.peer == (rank == 2 ? 3u : 2u));
  }
}

// A rank passes a wait because of the signal of a peer whose own wait has failed. It must be able to find this before
// its call ends.
void poison() {
  constexpr int kWorld = 3;
  for (int trial = 0; trial < 200; ++trial) {
    Ranks ranks(kWorld, 1);
    run(kWorld, [&](int rank) {
      const Lane lane = ranks.lane(rank);
      if (rank == 0)
        await_signal(lane, Call{0, 0, 100'000, kNoAnnouncement}, 1,
                     0);  // rank 1 never signals, so rank 0 sends garbage
      if (rank == 0) send_signal(lane, kSilent, 2, 0);
      if (rank == 2) {
        await_signal(lane, Call{0, 0, kLong, kNoAnnouncement}, 0, 0);
        REQUIRE(lane_failed(lane) || lane_notice(lane) == 1 + 0);
      }
    });
  }
}

// A rank that learns of a peer's failure does not notify the peer where the failure began. That peer may not have
// marked its lane yet, and its other streams must not report a failure of their own rank.
void hearsay() {
  Ranks ranks(3, 1);
  ranks.control[1][ranks.block.notice()] = 1 + 0;
  await_signal(ranks.lane(1), Call{0, 0, kLong, kNoAnnouncement}, 2, 0);
  REQUIRE(ranks.control[2][ranks.block.notice()] == 1 + 0);
  REQUIRE(ranks.control[0][ranks.block.notice()] == 0);
}

// A call fails at its end if a peer has reported a failure. The other peers are notified before this rank continues.
void end_of_call() {
  Ranks ranks(3, 1);
  REQUIRE(!call_failed(ranks.lane(1), Call{0, 0, kLong, kNoAnnouncement}) && !ranks.failed(1));
  ranks.control[1][ranks.block.notice()] = 1 + 0;
  REQUIRE(call_failed(ranks.lane(1), Call{0, 0, kLong, kNoAnnouncement}));
  REQUIRE(ranks.records[1].reason == kPeerFailed && ranks.records[1].peer == 0);
  REQUIRE(ranks.control[2][ranks.block.notice()] == 1 + 0);
  REQUIRE(call_failed(ranks.lane(1), Call{0, 0, kLong, kNoAnnouncement}));
}

// If the host of a rank gives up, its peers do not wait for work that the host will not launch. If the lane had already
// failed, the earlier record is kept.
void host_gives_up() {
  Ranks ranks(3, 1);
  run(3, [&](int rank) {
    if (rank == 0) {
      give_up(ranks.lane(0), Call{7, 9, kLong, kNoAnnouncement});
    } else {
      await_signal(ranks.lane(rank), Call{0, 0, kLong, kNoAnnouncement}, 0, 0);
    }
  });
  const FailureRecord& record = ranks.records[0];
  REQUIRE(record.reason == kGaveUp && record.op == 7 && record.call == 9 && record.peer == 0);
  for (int rank = 1; rank < 3; ++rank) {
    REQUIRE(ranks.records[rank].reason == kPeerFailed && ranks.records[rank].peer == 0);
  }
  give_up(ranks.lane(1), Call{7, 9, kLong, kNoAnnouncement});
  REQUIRE(ranks.records[1].reason == kPeerFailed && ranks.control[2][ranks.block.notice()] == 1 + 0);
  await_signal(ranks.lane(0), Call{0, 0, kLong, kNoAnnouncement}, 1, 0);  // this rank does not wait either
}

// A rank has died, so its host never reports that it gave up. A wait passes if its signal has arrived. The next wait
// fails at once, and the other ranks are notified.
void death() {
  Ranks ranks(3, 2);
  send_signal(ranks.lane(2), kSilent, 0, 0);
  ranks.mark_dead(0, 2);
  await_signal(ranks.lane(0), kSilent, 2, 0);
  REQUIRE(!ranks.failed(0));
  run(2, [&](int rank) {
    if (rank == 1) await_signal(ranks.lane(1), Call{0, 0, kLong, kNoAnnouncement}, 2, 1);
    if (rank == 0) await_signal(ranks.lane(0), Call{7, 9, kLong, kNoAnnouncement}, 2, 1);
  });
  const FailureRecord& record = ranks.records[0];
  REQUIRE(record.reason == kPeerDied && record.op == 7 && record.call == 9 && record.peer == 2);
  REQUIRE(record.channel == 1 && record.expected == 1 && record.found == 0);
  REQUIRE(ranks.records[1].reason == kPeerFailed && ranks.records[1].peer == 0);
  REQUIRE(ranks.control[2][ranks.block.notice()] == 1 + 0 || ranks.control[2][ranks.block.notice()] == 0);
  Ranks pair(2, 1);
  pair.mark_dead(0, 1);
  await_signal(pair.lane(0), kSilent, 1, 0);
  REQUIRE(pair.failed(0) && pair.control[1][pair.block.notice()] == 0);  // the dead rank is not written to
}

// While a wait polls, the peer's last signal arrives, and right after it the mark that the peer is dead. The wait does
// not overlook the signal.
void last_signal() {
  for (int trial = 0; trial < 300; ++trial) {
    Ranks ranks(2, 1);
    run(2, [&](int rank) {
      if (rank == 0) {
        await_signal(ranks.lane(0), kSilent, 1, 0);
        return;
      }
      send_signal(ranks.lane(1), kSilent, 0, 0);
      ranks.mark_dead(0, 1);
    });
    REQUIRE(!ranks.failed(0));
  }
}

Call announced(uint64_t hash, uint32_t number, uint64_t timeout_ns = kLong) {
  return Call{0, number, timeout_ns, announcement(hash, number)};
}

// Every rank makes its calls one after another. In each, it signals its peers and waits for them. Returns every rank's
// failure record.
std::vector<FailureRecord> calls(const std::vector<std::vector<Call>>& of_rank) {
  const int world = static_cast<int>(of_rank.size());
  Ranks ranks(world, 1);
  run(world, [&](int rank) {
    for (const Call& call : of_rank[rank]) {
      for (int peer = 0; peer < world; ++peer) {
        if (peer != rank) send_signal(ranks.lane(rank), call, peer, 0);
      }
      for (int peer = 0; peer < world; ++peer) {
        if (peer != rank) await_signal(ranks.lane(rank), call, peer, 0);
      }
    }
  });
  return ranks.records;
}

// A wait that ends by a signal checks that the signal's rank is in the same call. It fails if the hash or the number
// differs, or if the rank has announced no call. Every rank fails: it finds the mismatch itself or is notified.
void mismatch() {
  constexpr uint32_t kLast = 0xFFFFFFFFu;
  const std::vector<std::pair<std::vector<Call>, std::vector<Call>>> different{
      {{announced(1, 0), announced(2, 1)}, {announced(1, 0), announced(3, 1)}},
      {{announced(1, 1)}, {announced(1, 2)}},
      {{announced(1, kLast)}, {announced(1, 0)}},
      {{announced(uint64_t{1} << 63, 5)}, {announced(uint64_t{1} << 62, 5)}},
  };
  for (const auto& [first, second] : different) {
    const auto records = calls({first, second});
    for (int rank = 0; rank < 2; ++rank) {
      const FailureRecord& record = records[rank];
      REQUIRE(record.reason == kMismatch || record.reason == kPeerFailed);
      REQUIRE(record.peer == static_cast<uint32_t>(1 - rank));
      const Call &ours = (rank == 0 ? first : second).back(), &theirs = (rank == 0 ? second : first).back();
      if (record.reason == kMismatch) {
        REQUIRE(record.expected == number_of(ours.announced) && record.found == number_of(theirs.announced));
      }
    }
    REQUIRE(records[0].reason == kMismatch || records[1].reason == kMismatch);
  }
  const auto records = calls({{announced(1, 3)}, {kSilent}});
  REQUIRE(records[0].reason == kMismatch && records[0].expected == 3 && records[0].found == kNoCall);
  // The silent call compares nothing, but the other rank may have notified it before its wait.
  REQUIRE(records[1].reason == kNoFailure || records[1].reason == kPeerFailed);
}

// If a peer announces another call with the same number, the wait fails before its deadline, because the awaited signal
// would never arrive. A peer that is one call behind is only late.
void mismatch_while_waiting() {
  Ranks ranks(2, 2);
  send_signal(ranks.lane(1), announced(7, 4), 0, 0);
  await_signal(ranks.lane(0), announced(8, 4), 1, 1);
  REQUIRE(ranks.records[0].reason == kMismatch && ranks.records[0].peer == 1);
  REQUIRE(ranks.records[0].expected == 4 && ranks.records[0].found == 4);
  REQUIRE(ranks.control[1][ranks.block.notice()] == 1 + 0);

  Ranks late(2, 2);
  send_signal(late.lane(1), announced(7, 3), 0, 0);
  await_signal(late.lane(0), announced(7, 4, kSoon), 1, 1);
  REQUIRE(late.records[0].reason == kTimedOut);
}

int main(int, char** argv) {
  const std::map<std::string, void (*)()> cases{{"exchange", exchange}, {"timeout", timeout},
                                                {"race", race},         {"told", told},
                                                {"poison", poison},     {"hearsay", hearsay},
                                                {"end", end_of_call},   {"host", host_gives_up},
                                                {"mismatch", mismatch}, {"idle mismatch", mismatch_while_waiting},
                                                {"death", death},       {"last signal", last_signal}};
  cases.at(argv[1])();
}
