#include "cuda/lane_host.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <chrono>

#include "cuda/memory_wait.h"

namespace symm_overlap::cuda {
namespace {

void free_record(FailureRecord* record) {
  (void)cudaFreeHost(record);  // at exit the driver may be gone already, and its memory with it
}

FailureRecord* new_record() {
  void* memory = nullptr;
  C10_CUDA_CHECK(cudaHostAlloc(&memory, sizeof(FailureRecord), cudaHostAllocMapped | cudaHostAllocPortable));
  return new (memory) FailureRecord{};
}

// The record as the GPU addresses it.
FailureRecord* on_device(FailureRecord* record) {
  void* address = nullptr;
  C10_CUDA_CHECK(cudaHostGetDevicePointer(&address, record, 0));
  return static_cast<FailureRecord*>(address);
}

// With less time than that, nothing is handed over in time.
constexpr uint64_t kShortTimeoutNs = 4'000'000'000;

// The peers in groups, each of which one launch can take.
std::vector<Peers> in_launches(const std::vector<int>& peers) {
  std::vector<Peers> launches;
  for (const int peer : peers) {
    if (launches.empty() || launches.back().count == kMaxPeers) launches.emplace_back();
    Peers& some = launches.back();
    some.ranks[some.count++] = peer;
  }
  return launches;
}

}  // namespace

int64_t LaneHost::control_words(int world, int channels) {
  return static_cast<int64_t>(ControlBlock{world, channels}.words());
}

LaneHost::LaneHost(const at::Tensor& control, const at::Tensor& peers, int rank, int world, int channels,
                   bool in_memory)
    : control_(control),
      peers_(peers),
      record_(nullptr, free_record),
      lane_{},
      call_{},
      gates_(world, channels),
      device_(control.device().index()) {
  TORCH_CHECK_VALUE(world >= 1 && channels >= 1 && rank >= 0 && rank < world, "a lane needs 0 <= rank < world and at ",
                    "least one channel; got rank ", rank, ", world ", world, ", ", channels, " channels");
  const ControlBlock block{world, channels};
  TORCH_CHECK_VALUE(control.is_cuda() && control.is_contiguous() && control.scalar_type() == at::kInt &&
                        control.numel() == static_cast<int64_t>(block.words()),
                    "the control block for world ", world, " and ", channels, " channels is a CUDA tensor of ",
                    block.words(), " int32; got ", control.toString(), " of ", control.numel());
  TORCH_CHECK_VALUE(peers.device() == control.device() && peers.is_contiguous() && peers.scalar_type() == at::kLong &&
                        peers.numel() == world,
                    "the table of peers is ", world, " int64 on ", control.device(), "; got ", peers.toString(), " of ",
                    peers.numel(), " on ", peers.device());
  c10::cuda::CUDAGuard guard(device_);
  C10_CUDA_CHECK(load_signal_kernels());
  C10_CUDA_CHECK(load_poison_kernel());
  C10_CUDA_CHECK(load_sleep_kernel());
  C10_CUDA_CHECK(load_clock_kernels());
  C10_CUDA_CHECK(load_reduce_kernels());
  record_.reset(new_record());
  lane_ = Lane{static_cast<uint32_t*>(control.data_ptr()), static_cast<const uint64_t*>(peers.data_ptr()),
               on_device(record_.get()), block, rank};
  has_gates_ = in_memory && can_wait_in_memory(lane_.control, c10::cuda::getCurrentCUDAStream());
}

void LaneHost::begin(int64_t op, int64_t call, int64_t timeout_ns, uint64_t call_hash, int64_t number) {
  TORCH_CHECK_VALUE(timeout_ns > 0, "the timeout must be positive; got ", timeout_ns, " ns");
  call_ = Call{static_cast<uint32_t>(op), static_cast<uint32_t>(call), static_cast<uint64_t>(timeout_ns),
               announcement(call_hash, static_cast<uint32_t>(number))};
  c10::cuda::CUDAGuard guard(device_);
  // The hosts of all ranks count alike: they capture the same calls, whose replays they cannot count.
  gated_ = c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None;
}

void LaneHost::signal(const std::vector<int>& peers, int channel) {
  check_peers(peers);
  check_channel(channel);
  c10::cuda::CUDAGuard guard(device_);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  for (Peers& some : in_launches(peers)) {
    some.gated = gated_;
    for (int i = 0; gated_ && i < some.count; ++i) some.gates[i] = gates_.next_sent(some.ranks[i], channel);
    C10_CUDA_CHECK(launch_signal(lane_, call_, some, channel, stream));
  }
}

void LaneHost::wait(const std::vector<int>& peers, int channel) {
  check_peers(peers);
  check_channel(channel);
  c10::cuda::CUDAGuard guard(device_);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  for (const Peers& some : in_launches(peers)) {
    if (gated_) wait_at_gates(some, channel, stream);
    C10_CUDA_CHECK(launch_wait(lane_, call_, some, channel, stream));
  }
}

void LaneHost::wait_at_gates(const Peers& peers, int channel, cudaStream_t stream) {
  std::vector<AwaitedWord> words;
  const auto now = std::chrono::steady_clock::now();
  const bool in_memory = has_gates_ && call_.timeout_ns >= kShortTimeoutNs;
  for (int i = 0; i < peers.count; ++i) {
    // Counted also where the kernel alone waits: the peers open their gates all the same.
    const PendingGates::Gate gate{peers.ranks[i], channel, gates_.next_awaited(peers.ranks[i], channel)};
    if (!in_memory) continue;
    gates_.add(call_.number, gate, now);  // first: the stream waits as soon as it is told to
    words.push_back({lane_.control + lane_.block.gate(gate.peer, channel), gate.epoch});
  }
  if (in_memory) wait_in_memory(words, stream);
}

std::vector<PendingGates::Gate> LaneHost::overdue_gates(double seconds) {
  const auto patience = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
  const uint32_t ended = __atomic_load_n(&record_->ended, __ATOMIC_ACQUIRE);
  return gates_.overdue(ended, std::chrono::steady_clock::now() - patience);
}

bool LaneHost::overdue(double seconds) {
  return !overdue_gates(seconds).empty();
}

void LaneHost::hand_over(double seconds) {
  const auto gates = overdue_gates(seconds);
  c10::cuda::CUDAGuard guard(device_);
  for (size_t first = 0; first < gates.size(); first += kMaxGates) {
    Gates some{};
    for (size_t i = first; i < gates.size() && some.count < kMaxGates; ++i) some.items[some.count++] = gates[i];
    C10_CUDA_CHECK(launch_hand_over(lane_, some, c10::cuda::getCurrentCUDAStream()));
  }
}

void LaneHost::barrier(int channel) {
  check_channel(channel);
  c10::cuda::CUDAGuard guard(device_);
  C10_CUDA_CHECK(launch_barrier(lane_, call_, channel, c10::cuda::getCurrentCUDAStream()));
}

void LaneHost::sleep(int64_t cycles) {
  TORCH_CHECK_VALUE(cycles >= 0, "the sleep must not be negative; got ", cycles, " cycles");
  c10::cuda::CUDAGuard guard(device_);
  C10_CUDA_CHECK(launch_sleep(cycles, c10::cuda::getCurrentCUDAStream()));
}

void LaneHost::poison(const std::vector<at::Tensor>& outputs, bool ends) {
  c10::cuda::CUDAGuard guard(device_);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  for (const auto& output : outputs) {
    TORCH_CHECK_VALUE(output.is_cuda() && output.is_non_overlapping_and_dense(),
                      "only dense CUDA memory can be poisoned; got ", output.toString(), " with sizes ", output.sizes(),
                      " and strides ", output.strides());
  }
  size_t next = 0;
  do {
    Extents extents{};
    for (; next < outputs.size() && extents.count < kMaxExtents; ++next) {
      extents.items[extents.count++] = Extent{outputs[next].data_ptr(), outputs[next].nbytes()};
    }
    const bool last = next == outputs.size();
    C10_CUDA_CHECK(launch_poison(lane_, call_, extents, ends && last, stream));
  } while (next < outputs.size());
}

void LaneHost::give_up() {
  c10::cuda::CUDAGuard guard(device_);
  C10_CUDA_CHECK(launch_give_up(lane_, call_, c10::cuda::getCurrentCUDAStream()));
}

void LaneHost::mark_dead(int peer) {
  check_peers({peer});
  c10::cuda::CUDAGuard guard(device_);
  C10_CUDA_CHECK(launch_mark_dead(lane_, peer, c10::cuda::getCurrentCUDAStream()));
}

std::optional<FailureRecord> LaneHost::failure() const {
  // Pairs with the kernel's release store: once the reason is there, so is the rest.
  if (__atomic_load_n(&record_->reason, __ATOMIC_ACQUIRE) == kNoFailure) return std::nullopt;
  return *record_;
}

void LaneHost::check_peers(const std::vector<int>& peers) const {
  for (const int peer : peers) {
    TORCH_CHECK(peer >= 0 && peer < lane_.block.world, "symm_overlap: rank must be in [0, ", lane_.block.world,
                "), not ", peer);
    // Two threads of one launch would count the same epochs.
    TORCH_CHECK_VALUE(std::count(peers.begin(), peers.end(), peer) == 1, "symm_overlap: rank ", peer,
                      " is named more than once");
  }
}

void LaneHost::check_channel(int channel) const {
  TORCH_CHECK(channel >= 0 && channel < lane_.block.channels, "symm_overlap: channel must be in [0, ",
              lane_.block.channels, "), not ", channel, "; make the lane with more channels");
}

}  // namespace symm_overlap::cuda
