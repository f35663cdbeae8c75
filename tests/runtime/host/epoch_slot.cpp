// Tests csrc/cpu/epoch_slot.cpp with threads as ranks. The argument names the case to run. Exit code 0 means that the
// case passed.
#include "cpu/epoch_slot.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using namespace symm_overlap;
using cpu::EpochSlot;

#define REQUIRE(what) \
  if (!(what)) std::printf("line %d: not so: %s\n", __LINE__, #what), std::exit(1)

using Clock = std::chrono::steady_clock;

constexpr uint32_t kBeforeWrap = 0u - 500;  // epochs from here on pass 2^32 after 500
constexpr int64_t kSliceMs = 900;           // long, so that a wake-up that was missed takes conspicuously long

void wait(EpochSlot& slot, uint32_t expected) {
  const auto start = Clock::now();
  slot.sleep(expected, kSliceMs, [&] {
    const bool missed = Clock::now() - start > std::chrono::milliseconds(kSliceMs - 100) && slot.reached(expected);
    REQUIRE(!missed);
  });
}

// Two ranks take turns: each writes plain memory, signals, and reads what the other rank wrote.
void exchange(bool spins) {
  constexpr uint32_t kTimes = 1000;
  EpochSlot slots[2] = {};
  uint32_t messages[2] = {};
  slots[0].epoch = slots[1].epoch = kBeforeWrap;
  auto rank = [&](int me) {
    for (uint32_t i = 1; i <= kTimes; ++i) {
      const uint32_t epoch = kBeforeWrap + i;
      if (me == 0) {
        messages[0] = i;
        slots[0].signal(epoch);
      }
      EpochSlot& from = slots[1 - me];
      if (!(spins && from.spin(epoch))) wait(from, epoch);
      REQUIRE(messages[1 - me] == i);
      if (me == 1) {
        messages[1] = i;
        slots[1].signal(epoch);
      }
    }
  };
  std::thread peer(rank, 1);
  rank(0);
  peer.join();
  REQUIRE(slots[0].epoch == kBeforeWrap + kTimes && slots[0].sleepers == 0 && slots[1].sleepers == 0);
}

// A wait for a signal that has already arrived does not sleep. A signal that arrives later wakes all sleeping threads.
void sleepers() {
  EpochSlot slot = {};
  slot.epoch = kBeforeWrap;
  slot.signal(kBeforeWrap + 700);
  for (uint32_t i = 0; i <= 700; ++i) REQUIRE(slot.reached(kBeforeWrap + i) && slot.spin(kBeforeWrap + i));
  REQUIRE(!slot.reached(kBeforeWrap + 701) && !slot.spin(kBeforeWrap + 701));
  std::vector<std::thread> ranks;
  for (int i = 0; i < 3; ++i) ranks.emplace_back([&] { wait(slot, kBeforeWrap + 701); });
  while (slot.sleepers != 3) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  slot.signal(kBeforeWrap + 701);
  for (auto& rank : ranks) rank.join();
  REQUIRE(slot.sleepers == 0);
}

// `idle` is called once per time slice. If it throws, the sleep ends, and the sleeper is no longer counted, so later
// signals do not try to wake it.
void idle() {
  EpochSlot slot = {};
  int asked = 0;
  const auto start = Clock::now();
  try {
    slot.sleep(1, 20, [&] {
      if (++asked == 5) throw std::runtime_error("enough");
    });
    REQUIRE(false);
  } catch (const std::runtime_error&) {
  }
  REQUIRE(asked == 5 && Clock::now() - start >= std::chrono::milliseconds(100) && slot.sleepers == 0);
}

int main(int, char** arguments) {
  const std::string name = arguments[1];
  if (name == "spin") exchange(true);
  if (name == "sleep") exchange(false);
  if (name == "sleepers") sleepers();
  if (name == "idle") idle();
}
