#include "cuda/lane_host.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <utility>

#include "common/watch.h"
#include "cpu/allocator.h"
#include "cpu/known_peers.h"
#include "cpu/without_gil.h"
#include "cuda/memory_operations.h"
#include "cuda/ops.h"

namespace symm_overlap::cuda {
namespace {

void free_record(FailureRecord* record) {
  (void)cudaFreeHost(record);  // at exit the driver and its memory may already be gone
}

FailureRecord* new_record() {
  void* memory = nullptr;
  C10_CUDA_CHECK(cudaHostAlloc(&memory, sizeof(FailureRecord), cudaHostAllocMapped | cudaHostAllocPortable));
  return new (memory) FailureRecord{};
}

// Returns the record's address on the GPU.
FailureRecord* on_device(FailureRecord* record) {
  void* address = nullptr;
  C10_CUDA_CHECK(cudaHostGetDevicePointer(&address, record, 0));
  return static_cast<FailureRecord*>(address);
}

// Splits the peers into groups that fit one launch each.
std::vector<Peers> in_launches(const std::vector<int>& peers) {
  std::vector<Peers> launches;
  for (const int peer : peers) {
    if (launches.empty() || launches.back().count == kMaxPeers) launches.emplace_back();
    Peers& some = launches.back();
    some.ranks[some.count++] = peer;
  }
  return launches;
}

// From so many writes on, one kernel is quicker than memory operations, which have a fence each. On an H200, 14 writes
// took 9.8 us, as memory operations, and a kernel that signals 7 peers takes 2.5 us.
constexpr size_t kFewestInAKernel = 6;

// Splits operations that write into groups that fit one launch each.
std::vector<Writes> as_writes(const MemoryOperations& operations, const std::vector<uint32_t*>& blocks) {
  std::vector<Writes> launches;
  for (const MemoryOperation& each : operations) {
    if (launches.empty() || launches.back().count == kMaxWrites) launches.emplace_back();
    Writes& some = launches.back();
    some.items[some.count++] = {reinterpret_cast<uint64_t>(blocks[each.rank] + each.word), each.value,
                                each.kind == MemoryOperation::kWrite64};
  }
  return launches;
}

// Returns a function that says whether the process of a rank is known to have ended. It needs no group, store or GIL.
std::function<bool(int)> death_in(const std::string& group_name, int world) {
  std::vector<std::shared_ptr<const cpu::Peer>> processes(world);
  if (!group_name.empty()) {
    const auto group = c10d::resolve_process_group(group_name);
    for (int peer = 0; peer < world; ++peer) {
      processes[peer] = cpu::known_peer(*group, peer).value_or(nullptr);
    }
  }
  return [processes](int peer) { return processes[peer] && processes[peer]->dead(); };
}

// Returns the number of the capture that a stream is in; 0 if there is none, or it has failed.
unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  unsigned long long capture = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture));
  return status == cudaStreamCaptureStatusActive ? capture : 0;
}

std::unique_ptr<PinnedBlocks> pinned(const std::vector<at::Tensor>& hosts, const ControlBlock& block, int rank,
                                     const std::string& group_name) {
  if (hosts.empty()) return std::make_unique<PinnedBlocks>(block, rank);
  if (hosts.size() == 1 && !group_name.empty()) {
    auto memory = cpu::cpu_allocator().find(hosts[0].storage().mutable_data(), group_name);
    TORCH_CHECK_VALUE(memory && memory->get_rank() == rank && memory->get_world_size() == block.world,
                      "the host block has had no rendezvous in group ", group_name);
    return std::make_unique<PinnedBlocks>(std::move(memory));
  }
  TORCH_CHECK_VALUE(hosts.size() == static_cast<size_t>(block.world), "hosts must be one host block that has had its ",
                    "rendezvous, or one for each of ", block.world, " ranks of this process; got ", hosts.size());
  return std::make_unique<PinnedBlocks>(hosts);
}

}  // namespace

int64_t LaneHost::control_words(int world, int channels) {
  return static_cast<int64_t>(ControlBlock{world, channels}.words());
}

LaneHost::LaneHost(const at::Tensor& control, const at::Tensor& peers, int rank, int world, int channels,
                   const std::string& group_name, const std::vector<at::Tensor>& hosts)
    : control_(control),
      peers_(peers),
      device_(control.device().index()),
      block_{world, channels},
      record_(nullptr, free_record),
      lane_{},
      call_{},
      awaited_{} {
  TORCH_CHECK_VALUE(world >= 1 && channels >= 1 && rank >= 0 && rank < world, "a lane needs 0 <= rank < world and at ",
                    "least one channel; got rank ", rank, ", world ", world, ", ", channels, " channels");
  check_memory(control, peers, hosts);
  c10::cuda::CUDAGuard guard(device_);
  C10_CUDA_CHECK(load_signal_kernels());
  C10_CUDA_CHECK(load_poison_kernel());
  C10_CUDA_CHECK(load_sleep_kernel());
  C10_CUDA_CHECK(load_clock_kernels());
  C10_CUDA_CHECK(load_reduce_kernels());
  C10_CUDA_CHECK(load_meeting_kernels());
  record_.reset(new_record());
  pinned_ = pinned(hosts, block_, rank, group_name);
  if (pinned_->of_all_ranks()) flush_ = can_flush(device_);
  lane_ = Lane{static_cast<uint32_t*>(control.data_ptr()),
               static_cast<const uint64_t*>(peers.data_ptr()),
               on_device(record_.get()),
               pinned_->on_device()[rank],
               block_,
               rank};
  host_ = std::make_shared<HostLane>(block_, rank, pinned_->on_host(), pinned_->shared(), record_.get());
  Watch::of_this_process().look_after(host_, death_in(group_name, world));
}

// If a stream may still wait in this memory, or has launches left to run, the memory stays until the process ends. So
// does the memory that graphs use: a replay, which the host does not see, may wait for a peer that is yet to die.
LaneHost::~LaneHost() {
  // False in a forked process, which does not have the pinned memory.
  const bool left = capture_ == 0 && Watch::of_this_process().leave(host_);
  const bool ran = left && !open_ && epoch_reached(__atomic_load_n(&record_->ended, __ATOMIC_ACQUIRE), ends_);
  if (!ran) {
    (void)pinned_.release();
    (void)record_.release();
    (void)new at::Tensor(peers_);  // for ever: the allocator could give this memory to another stream
  }
  // To free memory may mean to wait for the device, whose streams may wait for what other threads are yet to launch.
  const cpu::WithoutGil without_gil;
  pinned_.reset();
  record_.reset();
  peers_.reset();
  control_.reset();
}

void LaneHost::check_memory(const at::Tensor& control, const at::Tensor& peers,
                            const std::vector<at::Tensor>& hosts) const {
  const auto words = static_cast<int64_t>(block_.words());
  TORCH_CHECK_VALUE(
      control.is_cuda() && control.is_contiguous() && control.scalar_type() == at::kInt && control.numel() == words,
      "the control block for world ", block_.world, " and ", block_.channels, " channels is a CUDA tensor of ", words,
      " int32; got ", control.toString(), " of ", control.numel());
  TORCH_CHECK_VALUE(peers.device() == control.device() && peers.is_contiguous() && peers.scalar_type() == at::kLong &&
                        peers.numel() == block_.world,
                    "the table of peers is ", block_.world, " int64 on ", control.device(), "; got ", peers.toString(),
                    " of ", peers.numel(), " on ", peers.device());
  for (const at::Tensor& host : hosts) {
    TORCH_CHECK_VALUE(host.is_cpu() && host.is_contiguous() && host.scalar_type() == at::kInt &&
                          host.numel() == words && block_.world <= kMostRanks,
                      "a host block is a CPU tensor of ", words, " int32, for at most ", kMostRanks, " ranks; got ",
                      host.toString(), " of ", host.numel());
  }
}

bool LaneHost::begin(int64_t op, int64_t call, int64_t timeout_ns, uint64_t call_hash, int64_t number,
                     bool by_kernels) {
  TORCH_CHECK_VALUE(timeout_ns > 0, "the timeout must be positive; got ", timeout_ns, " ns");
  c10::cuda::CUDAGuard guard(device_);
  // All ranks get the same result, because they capture the same calls.
  captured_ = c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const Done& done = captured_ ? captured_done_ : done_;
  // What another capture has recorded cannot be waited for. Its replays are ordered by barriers.
  if (done.on && *done.on != stream && done.capture == (captured_ ? capture_of(stream) : 0)) done.event.block(stream);
  in_memory_ = pinned_->of_all_ranks() && !captured_ && !by_kernels;
  ended_.reset();
  open_ = true;
  call_ = Call{static_cast<uint32_t>(op), static_cast<uint32_t>(call), static_cast<uint64_t>(timeout_ns),
               announcement(captured_ ? 0 : call_hash, static_cast<uint32_t>(number))};
  awaited_ = {};
  return captured_;
}

void LaneHost::signal(const std::vector<int>& peers, int channel, PendingOperations& pending) {
  check_peers(peers);
  check_channel(channel);
  c10::cuda::CUDAGuard guard(device_);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  if (in_memory_) {
    const MemoryOperations operations = host_->signal(call_, peers, channel);
    if (operations.size() < kFewestInAKernel) return pending.add(operations, pinned_->on_device(), flush_);
    pending.enqueue(stream);
    for (const Writes& some : as_writes(operations, pinned_->on_device())) {
      C10_CUDA_CHECK(launch_writes(some, stream));
    }
    return;
  }
  pending.enqueue(stream);
  for (const Peers& some : in_launches(peers)) C10_CUDA_CHECK(launch_signal(lane_, call_, some, channel, stream));
}

void LaneHost::wait(const std::vector<int>& peers, int channel, PendingOperations& pending) {
  check_peers(peers);
  check_channel(channel);
  c10::cuda::CUDAGuard guard(device_);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  if (in_memory_) {
    for (const int peer : peers) awaited_.add(peer);
    return pending.add(host_->wait(call_, peers, channel), pinned_->on_device(), flush_);
  }
  pending.enqueue(stream);
  for (const Peers& some : in_launches(peers)) C10_CUDA_CHECK(launch_wait(lane_, call_, some, channel, stream));
}

// Always a kernel, as in torch's own ops: only plans modelled on these ops have barriers.
void LaneHost::barrier(int channel) {
  check_channel(channel);
  c10::cuda::CUDAGuard guard(device_);
  C10_CUDA_CHECK(launch_barrier(lane_, call_, channel, Meet::kAlways, c10::cuda::getCurrentCUDAStream()));
}

bool LaneHost::barrier_around_replays(int channel) {
  check_channel(channel);
  c10::cuda::CUDAGuard guard(device_);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  if (captured_) {
    const unsigned long long capture = capture_of(stream);
    TORCH_CHECK(capture != 0, "symm_overlap: the capture of this CUDA graph has failed");
    // Between two calls of one graph, no call of another graph runs, unless the other graph was captured between them,
    // as the body of a loop is. (Or was launched into the capture, which docs/limits.md forbids.)
    if (capture == capture_) return false;
    capture_ = capture;
  }
  if (capture_ == 0) return false;
  const Meet when = captured_ ? Meet::kInReplay : Meet::kAfterReplays;
  C10_CUDA_CHECK(launch_barrier(lane_, call_, channel, when, stream));
  return captured_;
}

void LaneHost::meet_and_sum(int channel, const std::vector<at::Tensor>& partials, bool average, const at::Tensor& out,
                            const at::Tensor& copy, std::optional<int> done_channel) {
  check_channel(channel);
  if (done_channel) check_channel(*done_channel);
  TORCH_CHECK(!in_memory_, "symm_overlap: this call signals by memory operations, which a kernel cannot see");
  const Sum sum = checked_sum(partials, out, copy);
  const uint32_t end = done_channel ? 0 : next_end();
  c10::cuda::CUDAGuard guard(device_);
  C10_CUDA_CHECK(launch_meet_and_sum(lane_, call_, channel, done_channel.value_or(-1), sum.partials, sum.dtypes,
                                     average, out.data_ptr(), copy.defined() ? copy.data_ptr() : nullptr, out.numel(),
                                     end, c10::cuda::getCurrentCUDAStream()));
  if (done_channel) return;
  ended_.emplace(out);
  if (end != 0) host_->launched(call_, end);
}

void LaneHost::await_and_gather(int channel, const std::vector<int64_t>& from, int64_t part_bytes,
                                const at::Tensor& out) {
  check_channel(channel);
  TORCH_CHECK(!in_memory_, "symm_overlap: this call signals by memory operations, which a kernel cannot see");
  TORCH_CHECK(out.is_cuda() && out.is_contiguous() && static_cast<int>(from.size()) == lane_.block.world &&
                  lane_.block.world <= kMaxPartials,
              "symm_overlap: got parts of ", from.size(), " ranks in a group of ", lane_.block.world,
              ". Allowed are at most ", kMaxPartials, " ranks, one part of each, and a contiguous CUDA output");
  Partials places{};
  for (const int64_t place : from) places.items[places.count++] = reinterpret_cast<const void*>(place);
  const uint32_t end = next_end();
  c10::cuda::CUDAGuard guard(device_);
  C10_CUDA_CHECK(launch_await_and_gather(lane_, call_, channel, places, out.data_ptr(), part_bytes,
                                         static_cast<int64_t>(out.nbytes()), end, c10::cuda::getCurrentCUDAStream()));
  ended_.emplace(out);
  if (end != 0) host_->launched(call_, end);
}

uint32_t LaneHost::next_end() {
  open_ = captured_;
  if (captured_) return 0;
  return ++ends_ != 0 ? ends_ : ++ends_;
}

void LaneHost::sleep(int64_t cycles) {
  TORCH_CHECK_VALUE(cycles >= 0, "the sleep must not be negative; got ", cycles, " cycles");
  c10::cuda::CUDAGuard guard(device_);
  C10_CUDA_CHECK(launch_sleep(cycles, c10::cuda::getCurrentCUDAStream()));
}

bool LaneHost::end(const std::vector<at::Tensor>& outputs, const CudaFlags* flags) {
  c10::cuda::CUDAGuard guard(device_);
  if (flags != nullptr || !ended_ || !ended_->is_all_of(outputs)) poison(outputs, flags);
  Done& done = captured_ ? captured_done_ : done_;
  done.on = c10::cuda::getCurrentCUDAStream();
  done.capture = captured_ ? capture_of(*done.on) : 0;
  if (done.capture != 0 || !captured_) done.event.record(*done.on);
  return !captured_;
}

void LaneHost::poison(const std::vector<at::Tensor>& outputs, const CudaFlags* flags) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  for (const auto& output : outputs) {
    TORCH_CHECK_VALUE(output.is_cuda() && output.is_non_overlapping_and_dense(),
                      "only dense CUDA memory can be poisoned; got ", output.toString(), " with sizes ", output.sizes(),
                      " and strides ", output.strides());
  }
  const uint32_t end = next_end();
  UsedFlags used = flags == nullptr ? UsedFlags{} : flags->used();
  size_t next = 0;
  do {
    Extents extents{};
    for (; next < outputs.size() && extents.count < kMaxExtents; ++next) {
      extents.items[extents.count++] = Extent{outputs[next].data_ptr(), outputs[next].nbytes()};
    }
    const bool last = next == outputs.size();
    used.ended = last ? 1 : 0;
    C10_CUDA_CHECK(launch_poison(lane_, call_, awaited_, extents, used, last ? end : 0, stream));
  } while (next < outputs.size());
  if (end != 0 && !in_memory_) host_->launched(call_, end);
}

void LaneHost::give_up(int64_t op, int64_t call) {
  call_ = Call{static_cast<uint32_t>(op), static_cast<uint32_t>(call), call_.timeout_ns, announcement(0, 0)};
  open_ = true;
  if (pinned_->of_all_ranks()) return host_->give_up(call_);
  c10::cuda::CUDAGuard guard(device_);
  C10_CUDA_CHECK(launch_give_up(lane_, call_, c10::cuda::getCurrentCUDAStream()));
}

std::optional<FailureRecord> LaneHost::failure() const {
  if (const auto found = host_->failure()) return found;
  // Pairs with the kernel's release store: once the reason is visible, the rest is too.
  if (__atomic_load_n(&record_->reason, __ATOMIC_ACQUIRE) == kNoFailure) return std::nullopt;
  return *record_;
}

void LaneHost::check_peers(const std::vector<int>& peers) const {
  for (const int peer : peers) {
    TORCH_CHECK(peer >= 0 && peer < lane_.block.world, "symm_overlap: rank must be in [0, ", lane_.block.world,
                "), not ", peer);
    // Otherwise two threads of one launch would count the same epochs.
    TORCH_CHECK_VALUE(std::count(peers.begin(), peers.end(), peer) == 1, "symm_overlap: rank ", peer,
                      " is named more than once");
  }
}

void LaneHost::check_channel(int channel) const {
  TORCH_CHECK(channel >= 0 && channel < lane_.block.channels, "symm_overlap: channel must be in [0, ",
              lane_.block.channels, "), not ", channel, "; make the lane with more channels");
}

}  // namespace symm_overlap::cuda
