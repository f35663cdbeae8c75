// torch's SymmetricMemory for CPU ranks of one host: peers' buffers are mapped into this process.
#pragma once

#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "cpu/epoch_slot.h"
#include "cpu/peer.h"
#include "cpu/shared_object.h"

namespace symm_overlap::cpu {

// What one rank shares in one rendezvous: the caller's buffer, and a control object that belongs to this (buffer,
// group) alone, so that two groups over one buffer never meet in a signal pad.
struct RankMemory {
  std::shared_ptr<SharedObject> buffer;
  std::shared_ptr<SharedObject> control;
  std::shared_ptr<const Peer> peer;
};

// Layout of a control object: [torch signal pad | signal slots | barrier slots | told slots], slots indexed
// [source rank][channel].
struct ControlLayout {
  int world_size;
  size_t pad_bytes;

  // As many channels as torch's pad of 32-bit words has for this world size.
  int channels() const { return static_cast<int>(pad_bytes / sizeof(uint32_t)) / world_size; }
  size_t bytes() const;
  // A slot has a cache line of its own, whatever size of pad the user has set.
  size_t slots_at() const { return (pad_bytes + sizeof(EpochSlot) - 1) / sizeof(EpochSlot) * sizeof(EpochSlot); }
  EpochSlot* signal_slot(void* control, int source, int channel) const;
  EpochSlot* barrier_slot(void* control, int source, int channel) const;
  // 0, or 1 + the rank because of which `source` has given up.
  EpochSlot* told_slot(void* control, int source) const;
};

// As on CUDA, a tensor made by get_buffer or get_signal_pad does not keep the memory alive: the handle and the
// symmetric tensor do.
class CpuSymmetricMemory : public c10d::symmetric_memory::SymmetricMemory {
 public:
  CpuSymmetricMemory(std::string group, int64_t number, int rank, size_t buffer_bytes, ControlLayout layout,
                     std::vector<RankMemory> ranks);

  // Which rendezvous of its group made this, from 1 on: the same on every rank.
  int64_t number() const { return number_; }

  std::vector<void*> get_buffer_ptrs() override;
  std::vector<void*> get_signal_pad_ptrs() override;
  void** get_buffer_ptrs_dev() override;
  void** get_signal_pad_ptrs_dev() override;
  size_t get_buffer_size() override;
  size_t get_offset() override;
  bool has_multicast_support() override;
  void* get_multicast_ptr() override;

  // Each returns once the peers have arrived, or throws: DistBackendError past the deadline or when a peer is dead.
  void barrier(int channel, size_t timeout_ms) override;
  void put_signal(int dst_rank, int channel, size_t timeout_ms) override;
  void wait_signal(int src_rank, int channel, size_t timeout_ms) override;

  // After this rank has failed: it will signal nothing more, so what its peers wait for from it throws, now and later.
  // Otherwise they would wait until their deadline, since a rank that fails need not die. What other threads of this
  // rank wait for throws too.
  void give_up();
  // Its pid and why nothing more will come from `peer`; empty while something may.
  std::string gone(int peer) const;

  int get_rank() override;
  int get_world_size() override;
  c10::Device get_device() override;
  bool world_within_direct_access() override;

 private:
  void check_channel(int channel, const char* what) const;
  void check_peer(int peer, const char* what) const;
  // What is waited for: that a slot of the own control object reaches an epoch.
  struct Wait {
    const char* what;
    int channel;
    uint32_t expected;
    EpochSlot* (ControlLayout::*slot)(void* control, int source, int channel) const;
  };
  // For `count` ranks from `first` on, around the group.
  void wait(const Wait& wait, int first, int count, size_t timeout_ms);
  std::string process_of(int rank) const;
  bool spin_on(const EpochSlot& slot, uint32_t expected) const;
  [[noreturn]] void fail(const Wait& wait, int source, uint32_t found, int64_t waited_ms, const std::string& why);

  std::string group_;
  int64_t number_;
  int rank_;
  size_t buffer_bytes_;
  ControlLayout layout_;
  std::vector<RankMemory> ranks_;
  std::vector<void*> buffers_;
  std::vector<void*> pads_;
  // Epochs already used, by [rank][channel]. Each channel is one stream's: two threads never share one.
  std::vector<uint32_t> sent_;
  std::vector<uint32_t> awaited_;
  std::vector<uint32_t> barriers_;
  bool core_each_;                // this process may use as many cores as there are ranks
  std::atomic<int> culprit_{-1};  // the rank because of which a wait here failed
  std::atomic<bool> gave_up_{false};
};

}  // namespace symm_overlap::cpu
