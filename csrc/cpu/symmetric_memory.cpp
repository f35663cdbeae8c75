#include "cpu/symmetric_memory.h"

#include <c10/util/Exception.h>
#include <sched.h>
#include <unistd.h>

#include <utility>

#include "cpu/give_up.h"

namespace symm_overlap::cpu {

namespace {

// Whether this process may use at least as many cores as there are ranks.
bool cores_for(size_t ranks) {
  cpu_set_t cores;
  return ::sched_getaffinity(0, sizeof(cores), &cores) == 0 && static_cast<size_t>(CPU_COUNT(&cores)) >= ranks;
}

}  // namespace

CpuSymmetricMemory::CpuSymmetricMemory(std::string group, int64_t number, int rank, size_t buffer_bytes,
                                       ControlLayout layout, std::vector<RankMemory> ranks)
    : group_(std::move(group)),
      number_(number),
      rank_(rank),
      buffer_bytes_(buffer_bytes),
      layout_(layout),
      ranks_(std::move(ranks)),
      sent_(ranks_.size() * layout.channels()),
      awaited_(ranks_.size() * layout.channels()),
      barriers_(layout.channels()),
      core_each_(cores_for(ranks_.size())) {
  for (const RankMemory& memory : ranks_) {
    buffers_.push_back(memory.buffer->data());
    pads_.push_back(memory.control->data());
  }
}

std::vector<void*> CpuSymmetricMemory::get_buffer_ptrs() {
  return buffers_;
}

std::vector<void*> CpuSymmetricMemory::get_signal_pad_ptrs() {
  return pads_;
}

void** CpuSymmetricMemory::get_buffer_ptrs_dev() {
  return buffers_.data();
}

void** CpuSymmetricMemory::get_signal_pad_ptrs_dev() {
  return pads_.data();
}

size_t CpuSymmetricMemory::get_buffer_size() {
  return buffer_bytes_;
}

size_t CpuSymmetricMemory::get_offset() {
  return 0;
}

bool CpuSymmetricMemory::has_multicast_support() {
  return false;
}

void* CpuSymmetricMemory::get_multicast_ptr() {
  return nullptr;
}

int CpuSymmetricMemory::get_rank() {
  return rank_;
}

int CpuSymmetricMemory::get_world_size() {
  return static_cast<int>(ranks_.size());
}

c10::Device CpuSymmetricMemory::get_device() {
  return c10::Device(c10::kCPU);
}

bool CpuSymmetricMemory::world_within_direct_access() {
  return true;
}

void CpuSymmetricMemory::check_channel(int channel, const char* what) const {
  TORCH_CHECK(channel >= 0 && channel < layout_.channels(), "symm_overlap: ", what, ": channel must be in [0, ",
              layout_.channels(), ") for a group of ", ranks_.size(), " ranks, not ", channel,
              " (torch.distributed._symmetric_memory.set_signal_pad_size before the allocation raises the maximum "
              "supported channel)");
}

void CpuSymmetricMemory::check_peer(int peer, const char* what) const {
  TORCH_CHECK(peer >= 0 && peer < static_cast<int>(ranks_.size()), "symm_overlap: ", what, ": rank must be in [0, ",
              ranks_.size(), "), not ", peer);
}

std::string CpuSymmetricMemory::process_of(int rank) const {
  return "(pid " + std::to_string(ranks_[rank].peer->pid()) + ")";
}

uint32_t CpuSymmetricMemory::give_up_of(int rank) const {
  return layout_.give_up_slot(pads_[rank_], rank)->epoch.load(std::memory_order_acquire);
}

std::string CpuSymmetricMemory::why_gone(int peer) const {
  check_peer(peer, "why_gone");
  if (ranks_[peer].peer->dead()) {
    return process_of(peer) + " is dead";
  }
  const uint32_t word = give_up_of(peer);
  if (word == 0) {
    return "";
  }
  const int culprit = culprit_of(word);
  if (culprit == peer) {
    return process_of(peer) + (is_different_call(word) ? " has found a rank in a different call than its own"
                                                       : " has failed in this call or an earlier one");
  }
  return process_of(peer) + " has given up because of rank " + std::to_string(culprit) + " " + process_of(culprit) +
         (ranks_[culprit].peer->dead() ? ", which is dead,"
          : is_different_call(word)    ? ", which has found a rank in a different call than its own,"
                                       : ", which did not continue,");
}

void CpuSymmetricMemory::give_up() {
  gave_up_ = true;
  const uint32_t reason = reason_.load();
  for (int peer = 0; peer < get_world_size(); ++peer) {
    layout_.give_up_slot(pads_[peer], rank_)
        ->epoch.store(reason != 0 ? reason : give_up_word(rank_), std::memory_order_release);
  }
}

void CpuSymmetricMemory::announce(const Call& call) {
  if (call.hash == 0) {
    return;
  }
  for (int peer = 0; peer < get_world_size(); ++peer) {
    layout_.call_slot(pads_[peer], rank_)->announce(call);
  }
}

void CpuSymmetricMemory::barrier(int channel, size_t timeout_ms) {
  check_channel(channel, "barrier");
  // The epoch is counted only if the barrier succeeds. A barrier that timed out may be called again, and the new call
  // is then the same barrier.
  const uint32_t epoch = barriers_[channel] + 1;
  const int world_size = get_world_size();
  for (int step = 1; step < world_size; ++step) {
    const int peer = (rank_ + step) % world_size;
    layout_.barrier_slot(pads_[peer], rank_, channel)->signal(epoch);
  }
  wait({"barrier", channel, epoch, &ControlLayout::barrier_slot}, rank_ + 1, world_size - 1, timeout_ms);
  barriers_[channel] = epoch;
}

void CpuSymmetricMemory::put_signal(int dst_rank, int channel,
                                    size_t /*timeout_ms: an epoch never waits for its reader*/) {
  check_channel(channel, "put_signal");
  check_peer(dst_rank, "put_signal");
  const uint32_t epoch = ++sent_[dst_rank * layout_.channels() + channel];
  layout_.signal_slot(pads_[dst_rank], rank_, channel)->signal(epoch);
}

void CpuSymmetricMemory::wait_signal(int src_rank, int channel, size_t timeout_ms) {
  wait_signal_in(Call{}, src_rank, channel, timeout_ms);
}

void CpuSymmetricMemory::wait_signal_in(const Call& call, int src_rank, int channel, size_t timeout_ms) {
  check_channel(channel, "wait_signal");
  check_peer(src_rank, "wait_signal");
  uint32_t& awaited = awaited_[src_rank * layout_.channels() + channel];
  wait({"wait_signal", channel, awaited + 1, &ControlLayout::signal_slot, call}, src_rank, 1, timeout_ms);
  ++awaited;
}

}  // namespace symm_overlap::cpu
