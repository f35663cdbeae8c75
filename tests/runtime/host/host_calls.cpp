// Ranks that signal and wait by memory operations must be in the same call. The cases here test the comparison in
// csrc/common/host_lane.h and in the kernels of such calls.
#include "host_ranks.h"

// Ranks are in different calls. While a signal is awaited, the host finds this. Otherwise, the last kernel of the call
// finds it.
void mismatch() {
  Ranks ranks(2, 2);
  ranks.carry_out(ranks[1].signal(lasting(kLong, 7, 4), {0}, 0));
  std::thread stream([&] { ranks.carry_out(ranks[0].wait(lasting(kLong, 8, 4), {1}, 1)); });
  {
    const Looking looking(ranks);
    stream.join();
  }
  REQUIRE(ranks.fails(0, kMismatch, 1) && ranks[0].failure()->expected == 4 && ranks[0].failure()->found == 4);
  REQUIRE(ranks.word(1, ranks.block.notice()) == 1 + 0);

  for (const uint32_t theirs : {3u, 4u, 5u}) {
    Ranks other(2, 1);
    const Call call = lasting(kLong, 8, 4);
    other.carry_out(other[1].signal(lasting(kLong, theirs == 4 ? 7 : 8, theirs), {0}, 0));
    other.carry_out(other[0].wait(call, {1}, 0));
    other[0].look(Clock::now(), nobody);
    REQUIRE(!other[0].failure());
    REQUIRE(other.fails_at_the_end(0, call, {1}) && other.records[0].reason == kMismatch);
    REQUIRE(other.records[0].expected == 4 && other.records[0].found == theirs);
  }
  Ranks behind(2, 2);  // a peer that is one call behind is only late, and the lane does not fail
  behind.carry_out(behind[1].signal(lasting(kLong, 7, 3), {0}, 0));
  (void)behind[0].wait(lasting(kLong, 8, 4), {1}, 1);
  behind[0].look(Clock::now(), nobody);
  REQUIRE(!behind[0].failure());
}

// A rank that learns of a peer's failure notifies the others, but not the peer where the failure began. So that peer
// does not report itself.
void hearsay() {
  Ranks ranks(3, 1);
  ranks.word(1, ranks.block.notice()) = 1 + 0;
  ranks[1].look(Clock::now(), nobody);
  REQUIRE(ranks.word(2, ranks.block.notice()) == 1 + 0 && ranks.word(0, ranks.block.notice()) == 0);
  REQUIRE(!ranks[1].failure() && ranks[1].wait(lasting(kLong), {2}, 0).empty());  // the next call records it
  REQUIRE(call_failed(ranks.lane(1), lasting(kLong)));
  REQUIRE(ranks.records[1].reason == kPeerFailed && ranks.records[1].peer == 0 && ranks.records[1].call == 5);
}

// Kernels signal, wait and announce their calls in the control blocks. Streams do so in the host blocks.
void barrier() {
  constexpr int kWorld = 3;
  const auto meet = [](Ranks& ranks, int rank, const Call& call) {
    for (const int peer : others(kWorld, rank)) send_signal(ranks.lane(rank), call, peer, 0);
    for (const int peer : others(kWorld, rank)) await_signal(ranks.lane(rank), call, peer, 0);
  };
  Ranks ranks(kWorld, 2);
  const Looking looking(ranks);
  run(kWorld, [&](int rank) {
    for (uint32_t number = 0; number < 20; ++number) {
      const Call call = lasting(kLong, 1000 + number % 3, number);
      const auto peers = others(kWorld, rank);
      meet(ranks, rank, call);
      ranks.carry_out(ranks[rank].signal(call, peers, 1));
      ranks.carry_out(ranks[rank].wait(call, peers, 1));
      REQUIRE(!ranks.fails_at_the_end(rank, call, peers));
    }
  });
  Ranks different(kWorld, 2);
  run(kWorld, [&](int rank) { meet(different, rank, lasting(kLong, rank == 2 ? 8 : 7, 4)); });
  int found = 0;
  for (const FailureRecord& record : different.records) found += record.reason == kMismatch;
  REQUIRE(found > 0);
}

// If the host ends a wait, or does not begin it, the peer's announcement may be missing. This is not a mismatch: a
// missing announcement does not mean that the peer is in another call.
void no_false_mismatch() {
  const Call before = lasting(kLong, 70, 6), call = lasting(kLong, 77, 7);
  Ranks ranks(4, 2);
  for (int rank = 0; rank < 4; ++rank) {
    for (const int peer : others(4, rank)) ranks.carry_out(ranks[rank].signal(before, {peer}, 0));
  }
  const auto waits = ranks[0].wait(call, {3}, 1);
  ranks[2].give_up(call);
  for (const int rank : {0, 1}) ranks[rank].look(Clock::now(), nobody);
  ranks.carry_out(waits);
  REQUIRE(ranks.fails(0, kPeerFailed, 2) && !ranks[1].failure());  // rank 1 waits for nothing
  for (const int rank : {0, 1}) {
    REQUIRE(ranks[rank].wait(call, others(4, rank), 0).empty() && ranks.fails_at_the_end(rank, call, others(4, rank)));
    REQUIRE(ranks.records[rank].reason == kPeerFailed && ranks.records[rank].peer == 2);
  }
  REQUIRE(ranks.fails_at_the_end(2, call, {0}) && ranks.records[2].reason == kNoFailure && ranks.fails(2, kGaveUp, 2));

  for (const FailureReason reason : {kTimedOut, kPeerDied}) {
    Ranks late(2, 1);
    const auto wait = late[0].wait(lasting(kSoon, 77, 7), {1}, 0);
    late.word(0, late.block.reached(1, 0)) = 1;
    const auto now = Clock::now();
    for (const auto then : {now, now + milliseconds(60)}) late[0].look(then, [&](int) { return reason == kPeerDied; });
    late.carry_out(wait);
    REQUIRE(late.fails(0, reason, 1) && late.fails_at_the_end(0, lasting(kSoon, 77, 7), {1}));
    REQUIRE(late.records[0].reason == kNoFailure && late.control[1][late.block.notice()] == 0);
  }
}
