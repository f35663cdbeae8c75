// torch's SymmetricMemory for CPU ranks of one host: peers' buffers are mapped into this process.
#pragma once

#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "cpu/control_layout.h"
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

  // Tells every peer which call this rank is in, before its first signal of the call.
  void announce(const Call& call);
  // wait_signal within a call: throws also when the peer has announced another call than this one, now or while the
  // wait lasts, and then gives up, so that every rank throws.
  void wait_signal_in(const Call& call, int src_rank, int channel, size_t timeout_ms);

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
    Call call = {};
  };
  // For `count` ranks from `first` on, around the group.
  void wait(const Wait& wait, int first, int count, size_t timeout_ms);
  // The same for `first` alone, when its signal is late; it looks at how all `count` are.
  void wait_for_late(const Wait& wait, int first, int count, size_t timeout_ms);
  void look_at(const Wait& wait, int source, int64_t waited_ms);
  EpochSlot& slot_of(const Wait& wait, int source) const;
  std::string process_of(int rank) const;
  uint32_t give_up_of(int rank) const;
  bool spin_on(const EpochSlot& slot, uint32_t expected) const;
  std::string prologue(const Wait& wait) const;
  [[noreturn]] void fail(const Wait& wait, int source, uint32_t found, int64_t waited_ms, const std::string& why);
  [[noreturn]] void fail_as_different_call(const Wait& wait, int source);

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
  bool core_each_;                   // this process may use as many cores as there are ranks
  std::atomic<uint32_t> reason_{0};  // why a wait here failed first, as told to the peers
  std::atomic<bool> gave_up_{false};
};

}  // namespace symm_overlap::cpu
