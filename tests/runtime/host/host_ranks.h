// Ranks whose streams and hosts are threads, for tests of csrc/common/host_lane.h and watch.h.
#pragma once

#include "common/host_lane.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#include "cuda/signal.cuh"

using namespace symm_overlap;
using namespace symm_overlap::cuda;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

#define REQUIRE(what) \
  if (!(what)) std::printf("line %d: not so: %s\n", __LINE__, #what), std::exit(1)

constexpr uint64_t kSoon = 50'000'000, kLong = 60'000'000'000;  // nanoseconds

inline const auto nobody = [](int) { return false; };

inline Call lasting(uint64_t timeout_ns, uint64_t hash = 0, uint32_t number = 0) {
  return Call{3, 5, timeout_ns, announcement(hash, number)};
}

template <typename Rank>
void run(int world, Rank rank_main) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) threads.emplace_back(rank_main, rank);
  for (auto& thread : threads) thread.join();
}

inline std::vector<int> others(int world, int rank) {
  std::vector<int> all;
  for (int peer = 0; peer < world; ++peer) {
    if (peer != rank) all.push_back(peer);
  }
  return all;
}

struct Ranks {
  ControlBlock block;
  std::vector<std::vector<uint32_t>> host;
  std::vector<std::vector<uint32_t>> control;
  std::vector<uint64_t> peers;
  std::vector<FailureRecord> records;
  std::vector<std::shared_ptr<HostLane>> lanes;

  Ranks(int world, int channels) : block{world, channels}, records(world) {
    std::vector<uint32_t*> blocks;
    for (int rank = 0; rank < world; ++rank) {
      host.emplace_back(block.words());
      control.emplace_back(block.words());
    }
    for (auto& words : host) blocks.push_back(words.data());
    for (auto& words : control) peers.push_back(reinterpret_cast<uint64_t>(words.data()));
    for (int rank = 0; rank < world; ++rank) {
      lanes.push_back(std::make_shared<HostLane>(block, rank, blocks, true, &records[rank]));
    }
  }
  HostLane& operator[](int rank) { return *lanes[rank]; }
  uint32_t& word(int rank, size_t at) { return host[rank][at]; }
  // The lane as the kernels see it.
  Lane lane(int rank) {
    return Lane{control[rank].data(), peers.data(), &records[rank], host[rank].data(), block, rank};
  }

  // Carries out operations as a stream does.
  void carry_out(const MemoryOperations& operations) {
    for (const MemoryOperation& operation : operations) {
      uint32_t* at = &word(operation.rank, operation.word);
      const auto value = static_cast<uint32_t>(operation.value);
      if (operation.kind == MemoryOperation::kWrite64) {
        __atomic_store_n(reinterpret_cast<uint64_t*>(at), operation.value, __ATOMIC_RELEASE);
      } else if (operation.kind == MemoryOperation::kWrite32) {
        __atomic_store_n(at, value, __ATOMIC_RELEASE);
      } else {
        while (!epoch_reached(__atomic_load_n(at, __ATOMIC_ACQUIRE), value)) std::this_thread::yield();
      }
    }
  }
  // Brings all lanes to the state after `epochs` signals between all ranks have been sent and awaited.
  void advance(uint32_t epochs) {
    std::vector<int> all;
    for (int rank = 0; rank < block.world; ++rank) all.push_back(rank);
    for (int rank = 0; rank < block.world; ++rank) {
      for (int channel = 0; channel < block.channels; ++channel) {
        for (uint32_t i = 0; i < epochs; ++i) (void)lanes[rank]->signal(lasting(1), all, channel);
        for (uint32_t i = 0; i < epochs; ++i) (void)lanes[rank]->wait(lasting(1), all, channel);
        for (int source = 0; source < block.world; ++source) word(rank, block.slot(source, channel)) = epochs;
        word(rank, block.reached(0, channel)) = epochs;
      }
    }
    for (auto& lane : lanes) REQUIRE(lane->idle());
  }
  // Does what the last kernel of a call does, if the call has `awaited` these ranks. Returns whether the call failed.
  bool fails_at_the_end(int rank, const Call& call, const std::vector<int>& awaited) {
    const Lane kernel = lane(rank);
    for (const int peer : awaited) require_same_call(kernel, kernel.host, call, peer, 0);
    return call_failed(kernel, call);
  }
  bool fails(int rank, FailureReason reason, int peer) {
    const auto failure = lanes[rank]->failure();
    return failure && failure->reason == reason && failure->peer == static_cast<uint32_t>(peer) && failure->op == 3 &&
           failure->call == 5;
  }
};

// Checks every lane repeatedly, as the watch does, until it is destroyed.
class Looking {
 public:
  explicit Looking(Ranks& ranks, std::function<bool(int)> died = nobody)
      : thread_([this, &ranks, died] {
          while (!over_) {
            for (auto& lane : ranks.lanes) lane->look(Clock::now(), died);
            std::this_thread::sleep_for(milliseconds(1));
          }
        }) {}
  ~Looking() { over_ = true, thread_.join(); }

 private:
  std::atomic<bool> over_{false};
  std::thread thread_;
};
