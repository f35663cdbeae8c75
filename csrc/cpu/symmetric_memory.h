// torch's SymmetricMemory for CPU ranks of one host. The buffers of the peers are mapped into this process.
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

// The memory that one rank shares in one rendezvous: the caller's buffer, and a control object. Each (buffer, group)
// has its own control object, so that two groups over one buffer never use the same signal pad.
struct RankMemory {
  std::shared_ptr<SharedObject> buffer;
  std::shared_ptr<SharedObject> control;
  std::shared_ptr<const Peer> peer;
};

// As on CUDA, a tensor that get_buffer or get_signal_pad returns does not keep the memory alive. The handle and the
// symmetric tensor keep it alive.
class CpuSymmetricMemory : public c10d::symmetric_memory::SymmetricMemory {
 public:
  CpuSymmetricMemory(std::string group, int64_t number, int rank, size_t buffer_bytes, ControlLayout layout,
                     std::vector<RankMemory> ranks);

  // The number of the rendezvous of its group that created this handle, from 1 on. It is the same on every rank.
  int64_t number() const { return number_; }

  std::vector<void*> get_buffer_ptrs() override;
  std::vector<void*> get_signal_pad_ptrs() override;
  void** get_buffer_ptrs_dev() override;
  void** get_signal_pad_ptrs_dev() override;
  size_t get_buffer_size() override;
  size_t get_offset() override;
  bool has_multicast_support() override;
  void* get_multicast_ptr() override;

  // `barrier` and `wait_signal` return when the peers have arrived. They throw DistBackendError if the deadline has
  // passed or a peer is dead. `put_signal` never waits.
  void barrier(int channel, size_t timeout_ms) override;
  void put_signal(int dst_rank, int channel, size_t timeout_ms) override;
  void wait_signal(int src_rank, int channel, size_t timeout_ms) override;

  // Announces to every peer which call this rank is in. To be called before this rank's first signal of the call.
  void announce(const Call& call);
  // wait_signal within a call. It also throws if the peer has announced another call than `call`, before or during the
  // wait. This rank then gives up, so that every rank throws.
  void wait_signal_in(const Call& call, int src_rank, int channel, size_t timeout_ms);

  // To be called after this rank has failed. It will send no more signals, so all waits of peers for this rank throw,
  // now and later. Otherwise the peers would wait until their deadline, because the process of a failed rank may live
  // on. Waits in other threads of this rank throw too.
  void give_up();
  // The pid of `peer`, and the reason why nothing more will come from it. Empty if something may still come.
  std::string why_gone(int peer) const;

  int get_rank() override;
  int get_world_size() override;
  c10::Device get_device() override;
  bool world_within_direct_access() override;

 private:
  void check_channel(int channel, const char* what) const;
  void check_peer(int peer, const char* what) const;
  // The condition of a wait: a slot of this rank's control object reaches an epoch.
  struct Wait {
    const char* what;
    int channel;
    uint32_t expected;
    EpochSlot* (ControlLayout::*slot)(void* control, int source, int channel) const;
    Call call = {};
  };
  // Waits for `count` ranks from `first` on, around the group.
  void wait(const Wait& wait, int first, int count, size_t timeout_ms);
  // Waits for `first` only, whose signal is late. Meanwhile it checks the state of all `count` ranks.
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
  // The epochs that have been used, by [rank][channel]. A channel belongs to one stream: two threads never share it.
  std::vector<uint32_t> sent_;
  std::vector<uint32_t> awaited_;
  std::vector<uint32_t> barriers_;
  bool core_each_;                   // this process may use at least as many cores as there are ranks
  std::atomic<uint32_t> reason_{0};  // why the first wait here failed, as the word that the peers receive
  std::atomic<bool> gave_up_{false};
};

}  // namespace symm_overlap::cpu
