// Tests the signals of emulated peers (bench/emulation/mirror.py). The control blocks of the peers are shifted views of
// this rank's own block. Exit code 0 means that a signal to rank q arrives as a signal of rank W - q, and that nothing
// else is written.
#define __device__
#include "cuda/signal.cuh"

#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace symm_overlap;
using namespace symm_overlap::cuda;

#define REQUIRE(what) \
  if (!(what)) std::printf("line %d: not so: %s\n", __LINE__, #what), std::exit(1)

void mirrored(int world, int channels) {
  const ControlBlock block{world, channels};
  std::vector<size_t> shifts;
  size_t most = 0;
  for (int peer = 0; peer < world; ++peer) {
    shifts.push_back(block.slot((world - peer) % world, 0) - block.slot(0, 0));
    if (shifts.back() > most) most = shifts.back();
  }
  std::vector<uint32_t> memory(block.words() + most);
  std::vector<uint64_t> peers;
  for (const size_t shift : shifts) peers.push_back(reinterpret_cast<uint64_t>(memory.data() + shift));
  FailureRecord record{};
  Lane lane{};
  lane.control = memory.data();
  lane.peers = peers.data();
  lane.record = &record;
  lane.block = block;
  const Call call{0, 0, 50'000'000, kNoAnnouncement};

  for (uint32_t turn = 1; turn <= 3; ++turn) {
    for (int peer = 1; peer < world; ++peer) {
      for (int channel = 0; channel < channels; ++channel) {
        const int source = world - peer;
        REQUIRE(memory[block.slot(source, channel)] == turn - 1);
        send_signal(lane, call, peer, channel);
        REQUIRE(memory[block.slot(source, channel)] == turn);
      }
    }
    for (int peer = 1; peer < world; ++peer) {
      for (int channel = 0; channel < channels; ++channel) await_signal(lane, call, peer, channel);
    }
  }
  REQUIRE(record.reason == kNoFailure);
  // Only slots and counters have been written.
  for (int peer = 1; peer < world; ++peer) {
    for (int channel = 0; channel < channels; ++channel) {
      for (const size_t word : {block.slot(peer, channel), block.sent(peer, channel), block.awaited(peer, channel)}) {
        REQUIRE(memory[word] == 3);
        memory[word] = 0;
      }
    }
  }
  for (const uint32_t word : memory) REQUIRE(word == 0);
}

int main() {
  for (int world : {2, 3, 4, 8}) {
    for (int channels : {1, 9}) mirrored(world, channels);
  }
}
