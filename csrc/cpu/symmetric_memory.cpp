#include "cpu/symmetric_memory.h"

#include <c10/util/Exception.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "cpu/deadline.h"
#include "cpu/without_gil.h"

namespace symm_overlap::cpu {

namespace {

// How often a sleeping wait asks whether its peer lives and whether Ctrl-C was pressed.
constexpr int64_t kLookUpMs = 100;
// Turns of spinning before a wait sleeps, about 100 us.
constexpr int kPatience = 20;

// Whether this process may use as many cores as there are ranks.
bool cores_for(size_t ranks) {
  cpu_set_t cores;
  return ::sched_getaffinity(0, sizeof(cores), &cores) == 0 && static_cast<size_t>(CPU_COUNT(&cores)) >= ranks;
}

}  // namespace

size_t ControlLayout::bytes() const {
  return slots_at() + sizeof(EpochSlot) * world_size * (2 * channels() + 1);
}

EpochSlot* ControlLayout::signal_slot(void* control, int source, int channel) const {
  return reinterpret_cast<EpochSlot*>(static_cast<char*>(control) + slots_at()) + source * channels() + channel;
}

EpochSlot* ControlLayout::barrier_slot(void* control, int source, int channel) const {
  return signal_slot(control, source, channel) + world_size * channels();
}

EpochSlot* ControlLayout::told_slot(void* control, int source) const {
  return barrier_slot(control, world_size, 0) + source;
}

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
  TORCH_CHECK_INDEX(channel >= 0 && channel < layout_.channels(), "symm_overlap: ", what, ": channel ", channel,
                    " is out of range: a group of ", ranks_.size(), " ranks has channels 0 to ", layout_.channels() - 1,
                    " (torch.distributed._symmetric_memory.set_signal_pad_size before the allocation gives more)");
}

void CpuSymmetricMemory::check_peer(int peer, const char* what) const {
  TORCH_CHECK_INDEX(peer >= 0 && peer < static_cast<int>(ranks_.size()), "symm_overlap: ", what, ": rank ", peer,
                    " is out of range: the group has ranks 0 to ", ranks_.size() - 1);
}

void CpuSymmetricMemory::wait(const Wait& wait, int first, int count, size_t timeout_ms) {
  const auto source = [&](int i) { return (first + i) % get_world_size(); };
  const auto slot = [&](int i) -> EpochSlot& { return *(layout_.*wait.slot)(pads_[rank_], source(i), wait.channel); };
  for (int i = 0; i < count; ++i) {
    if (slot(i).spin(wait.expected)) {
      continue;
    }
    const WithoutGil without_gil;  // which torch's bindings call us with
    if (spin_on(slot(i), wait.expected)) {
      continue;
    }
    const int64_t timeout = timeout_ms_or_default(static_cast<int64_t>(timeout_ms));
    const auto start = std::chrono::steady_clock::now();
    slot(i).sleep(wait.expected, std::min(kLookUpMs, timeout), [&] {
      const auto waited =
          std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start).count();
      // All that are still to come: of one that is gone, the others may make us wait long.
      for (int j = i; j < count; ++j) {
        // Gone first, then the slot: what a peer signalled before it exited still counts.
        const std::string why = gone(source(j));
        const uint32_t found = slot(j).epoch.load(std::memory_order_acquire);
        if (!why.empty() && !epoch_reached(found, wait.expected)) {
          fail(wait, source(j), found, waited, why);
        }
      }
      const uint32_t found = slot(i).epoch.load(std::memory_order_acquire);
      if (waited >= timeout && !epoch_reached(found, wait.expected)) {
        fail(wait, source(i), found, waited, "");
      }
      TORCH_CHECK_WITH(DistBackendError, !gave_up_ || epoch_reached(found, wait.expected), "symm_overlap: ", wait.what,
                       " on rank ", rank_, " of ", ranks_.size(), " (group '", group_, "') for rank ", source(i),
                       ": this rank has failed meanwhile");
      without_gil.check_signals();
    });
  }
}

bool CpuSymmetricMemory::spin_on(const EpochSlot& slot, uint32_t expected) const {
  // A peer that is a little late is met sooner awake: to be woken takes some 50 us. But only with a core for every
  // rank.
  for (int turn = 0; core_each_ && turn < kPatience; ++turn) {
    if (slot.spin(expected)) {
      return true;
    }
  }
  return false;
}

void CpuSymmetricMemory::fail(const Wait& wait, int source, uint32_t found, int64_t waited_ms, const std::string& why) {
  const uint32_t told = layout_.told_slot(pads_[rank_], source)->epoch.load(std::memory_order_acquire);
  int nobody = -1;
  culprit_.compare_exchange_strong(nobody, told != 0 ? static_cast<int>(told) - 1 : source);
  const std::string next = why.empty()
                               ? "Is that rank in the same call? A longer deadline: symm_overlap.timeout(seconds) or "
                                 "SYMM_OVERLAP_TIMEOUT."
                               : "Its own output says why; this group cannot go on.";
  C10_THROW_ERROR(DistBackendError,
                  c10::str("symm_overlap: ", wait.what, " on rank ", rank_, " of ", ranks_.size(), " (group '", group_,
                           "', pid ", ::getpid(), ", channel ", wait.channel, "): rank ", source, " ",
                           why.empty() ? process_of(source) + " did not signal" : why, " after ", waited_ms / 1000.0,
                           " s: expected epoch ", wait.expected, ", found ", found, ". ", next));
}

std::string CpuSymmetricMemory::process_of(int rank) const {
  return "(pid " + std::to_string(ranks_[rank].peer->pid()) + ")";
}

std::string CpuSymmetricMemory::gone(int peer) const {
  if (ranks_[peer].peer->dead()) {
    return process_of(peer) + " is dead";
  }
  const uint32_t told = layout_.told_slot(pads_[rank_], peer)->epoch.load(std::memory_order_acquire);
  if (told == 0) {
    return "";
  }
  const int culprit = static_cast<int>(told) - 1;
  if (culprit == peer) {
    return process_of(peer) + " has failed in this call or an earlier one";
  }
  return process_of(peer) + " has given up because of rank " + std::to_string(culprit) + " " + process_of(culprit) +
         (ranks_[culprit].peer->dead() ? ", which is dead," : ", which did not go on,");
}

void CpuSymmetricMemory::give_up() {
  gave_up_ = true;
  const int culprit = culprit_.load() >= 0 ? culprit_.load() : rank_;
  for (int peer = 0; peer < get_world_size(); ++peer) {
    layout_.told_slot(pads_[peer], rank_)->epoch.store(static_cast<uint32_t>(culprit) + 1, std::memory_order_release);
  }
}

void CpuSymmetricMemory::barrier(int channel, size_t timeout_ms) {
  check_channel(channel, "barrier");
  // Counted only when it succeeds: a barrier that timed out may be called again, and means the same barrier.
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
  check_channel(channel, "wait_signal");
  check_peer(src_rank, "wait_signal");
  uint32_t& awaited = awaited_[src_rank * layout_.channels() + channel];
  wait({"wait_signal", channel, awaited + 1, &ControlLayout::signal_slot}, src_rank, 1, timeout_ms);
  ++awaited;
}

}  // namespace symm_overlap::cpu
