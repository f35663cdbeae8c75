// Gates at which streams wait ahead of their waits, with threads as GPUs and as the host. Run one case by name; exit
// code 0 means it held.
#define __device__
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "common/pending_gates.h"
#include "cuda/signal.cuh"

using namespace symm_overlap;
using namespace symm_overlap::cuda;

#define REQUIRE(what) \
  if (!(what)) std::printf("line %d: not so: %s\n", __LINE__, #what), std::exit(1)

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::seconds;

struct Pair {
  ControlBlock block{2, 2};
  std::vector<uint32_t> control[2] = {std::vector<uint32_t>(block.words()), std::vector<uint32_t>(block.words())};
  uint64_t peers[2] = {reinterpret_cast<uint64_t>(control[0].data()), reinterpret_cast<uint64_t>(control[1].data())};
  FailureRecord records[2] = {};
  Lane lane(int rank) { return Lane{control[rank].data(), peers, &records[rank], block, rank}; }
  uint32_t& gate(int rank, int channel) { return control[rank][block.gate(1 - rank, channel)]; }
};

Call lasting(uint64_t timeout_ns) {
  return Call{0, 1, timeout_ns, kNoAnnouncement};
}

// What a stream memory operation does.
void wait_at_gate(const uint32_t& gate, uint32_t epoch) {
  while (!epoch_reached(load_relaxed_system(&gate), epoch)) std::this_thread::yield();
}

// The kernel behind the gate finds the signal there, and what came before it.
void opened() {
  Pair pair;
  int value = 0;
  std::thread peer([&] {
    for (uint32_t round = 1; round <= 200; ++round) {
      value = static_cast<int>(round);
      send_signal(pair.lane(1), lasting(1), 0, 0);
      open_gate(pair.lane(1), 0, 0, round);
      await_signal(pair.lane(1), lasting(60'000'000'000), 0, 1);
    }
  });
  for (uint32_t round = 1; round <= 200; ++round) {
    wait_at_gate(pair.gate(0, 0), round);
    await_signal(pair.lane(0), lasting(1), 1, 0);  // it could wait for no more than a nanosecond
    REQUIRE(value == static_cast<int>(round));
    send_signal(pair.lane(0), lasting(1), 1, 1);
  }
  peer.join();
  REQUIRE(pair.records[0].reason == kNoFailure);
}

// Nobody signals: once the host has handed over, the kernel behind the gate comes to its deadline.
void handed_over() {
  Pair pair;
  std::thread stream([&] {
    wait_at_gate(pair.gate(0, 1), 1);
    await_signal(pair.lane(0), lasting(1'000'000), 1, 1);
  });
  hand_over(pair.lane(0), 1, 1, 1);
  stream.join();
  REQUIRE(pair.records[0].reason == kTimedOut && pair.records[0].peer == 1 && pair.records[0].channel == 1);
  hand_over(pair.lane(0), 1, 1, 0);  // never shuts a gate
  REQUIRE(pair.gate(0, 1) == 1);
  pair.gate(0, 1) = 0xFFFFFFFFu;
  hand_over(pair.lane(0), 1, 1, 2);  // across the wrap
  REQUIRE(pair.gate(0, 1) == 2);
}

bool are(const std::vector<PendingGates::Gate>& gates, std::vector<std::vector<uint32_t>> expected) {
  std::vector<std::vector<uint32_t>> found;
  for (const auto& gate : gates) found.push_back({uint32_t(gate.peer), uint32_t(gate.channel), gate.epoch});
  return found == expected;
}

void pending() {
  PendingGates gates(3, 2);
  REQUIRE(gates.next_sent(1, 0) == 1 && gates.next_sent(1, 0) == 2 && gates.next_sent(1, 1) == 1);
  REQUIRE(gates.next_awaited(1, 0) == 1 && gates.next_awaited(2, 0) == 1 && gates.next_awaited(2, 1) == 1);
  const auto start = Clock::now();
  gates.add(5, {1, 0, 7}, start);
  gates.add(5, {2, 1, 3}, start + Seconds(1));
  gates.add(6, {1, 0, 8}, start + Seconds(2));
  REQUIRE(are(gates.overdue(4, start - Seconds(1)), {}));
  REQUIRE(are(gates.overdue(4, start), {{1, 0, 7}}));
  REQUIRE(are(gates.overdue(4, start), {{1, 0, 7}}));                          // again: the peer may have shut it
  REQUIRE(are(gates.overdue(4, start + Seconds(3)), {{1, 0, 8}, {2, 1, 3}}));  // each with its latest epoch
  REQUIRE(are(gates.overdue(5, start + Seconds(3)), {{1, 0, 8}}));
  REQUIRE(are(gates.overdue(4, start + Seconds(3)), {{1, 0, 8}}));  // what has ended is forgotten
  REQUIRE(are(gates.overdue(6, start + Seconds(3)), {}));
  gates.add(0xFFFFFFFFu, {1, 0, 9}, start);
  gates.add(0, {1, 0, 10}, start);
  REQUIRE(are(gates.overdue(0xFFFFFFFFu, start), {{1, 0, 10}}));  // calls wrap too
}

int main(int, char** argv) {
  const std::map<std::string, void (*)()> cases{{"opened", opened}, {"handed over", handed_over}, {"pending", pending}};
  cases.at(argv[1])();
}
