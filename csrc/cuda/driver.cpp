#include "cuda/driver.h"

#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "cuda/clock.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

namespace symm_overlap::cuda {

namespace {

cudaEvent_t new_event() {
  cudaEvent_t event = nullptr;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

}  // namespace

CudaDriver::CudaDriver(LaneHost& lane, int64_t sleep_cycles)
    : lane_(lane), sleep_cycles_(sleep_cycles), device_(static_cast<c10::DeviceIndex>(lane.device())) {
  streams_.push_back(c10::cuda::getDefaultCUDAStream(device_));
  used_.push_back(false);
}

int CudaDriver::number_of(int64_t handle) {
  const auto stream = c10::cuda::getStreamFromExternal(reinterpret_cast<cudaStream_t>(handle), device_);
  const auto found = std::find(streams_.begin() + 1, streams_.end(), stream);
  if (found != streams_.end()) {
    return static_cast<int>(found - streams_.begin());
  }
  streams_.push_back(stream);
  used_.push_back(false);
  return static_cast<int>(streams_.size()) - 1;
}

void CudaDriver::reserve_events(int count) {
  const c10::cuda::CUDAGuard guard(device_);
  while (static_cast<int>(events_.size()) < count) {
    events_.push_back(new_event());
  }
}

void CudaDriver::emulate_link(std::shared_ptr<EmulatedLink> link, const std::vector<at::Tensor>& peers) {
  link_ = std::move(link);
  peers_.clear();
  for (const at::Tensor& memory : peers) {
    const char* begin = static_cast<const char*>(memory.const_data_ptr());
    peers_.emplace_back(begin, begin + memory.nbytes());
  }
}

bool CudaDriver::is_of_peer(const char* address) const {
  return std::any_of(peers_.begin(), peers_.end(),
                     [&](const auto& memory) { return memory.first <= address && address < memory.second; });
}

void CudaDriver::begin() {
  without_gil_.emplace();
  try {
    guard_.emplace(device_);
    if (!entered_) {
      streams_[0] = c10::cuda::getCurrentCUDAStream(device_);
      std::fill(used_.begin(), used_.end(), false);
      current_ = 0;
    }
  } catch (...) {  // `end` is not called in this case
    guard_.reset();
    without_gil_.reset();
    throw;
  }
  entered_ = false;
}

void CudaDriver::end() noexcept {
  if (!entered_ && current_ != 0) {
    c10::cuda::setCurrentCUDAStream(streams_[0]);
    current_ = 0;
  }
  guard_.reset();
  without_gil_.reset();
}

void CudaDriver::abandon() noexcept {
  const cpu::WithoutGil without_gil;
  pending_.clear();  // the lane gives up, which ends the waits of the peers
  entered_ = false;
  current_ = 0;
  int before = 0;
  // No guard here: it throws if CUDA itself has failed. In that case there is nothing to join.
  if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device_) != cudaSuccess) return;
  // An interruption may come before `begin`. In that case streams_[0] belongs to an earlier call, and the current
  // stream is the caller's: only this driver makes one of its side streams the current one.
  if (const auto now = c10::cuda::getCurrentCUDAStream(device_);
      std::find(streams_.begin() + 1, streams_.end(), now) == streams_.end()) {
    streams_[0] = now;
  }
  c10::cuda::setCurrentCUDAStream(streams_[0]);
  for (size_t side = 1; side < streams_.size(); ++side) {
    cudaEvent_t event = nullptr;
    if (used_[side] && cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess) {
      (void)cudaEventRecord(event, streams_[side]);
      (void)cudaStreamWaitEvent(streams_[0], event, 0);
      (void)cudaEventDestroy(event);  // CUDA keeps it until it has been reached
    }
  }
  (void)cudaSetDevice(before);
  (void)cudaGetLastError();  // otherwise the next launch would report this error as its own
}

void CudaDriver::flush() {
  pending_.enqueue(streams_[current_]);
}

cudaStream_t CudaDriver::on(int stream) {
  flush();
  pending_on(stream);
  return streams_[stream];
}

PendingOperations& CudaDriver::pending_on(int stream) {
  if (stream != current_) {
    flush();
    c10::cuda::setCurrentCUDAStream(streams_.at(stream));
    current_ = stream;
  }
  used_[stream] = true;
  return pending_;
}

void CudaDriver::enter(int stream) {
  on(stream);
  entered_ = true;
}

void CudaDriver::signal(int stream, const std::vector<int>& peers, int channel) {
  lane_.signal(peers, channel, pending_on(stream));
}

void CudaDriver::wait(int stream, const std::vector<int>& peers, int channel) {
  lane_.wait(peers, channel, pending_on(stream));
}

void CudaDriver::barrier(int stream, int channel) {
  on(stream);
  lane_.barrier(channel);
}

void CudaDriver::sleep(int stream) {
  on(stream);
  lane_.sleep(sleep_cycles_);
}

void CudaDriver::record(int stream, int event) {
  C10_CUDA_CHECK(cudaEventRecord(events_.at(event), on(stream)));
}

void CudaDriver::follow(int stream, int event) {
  C10_CUDA_CHECK(cudaStreamWaitEvent(on(stream), events_.at(event), 0));
}

void CudaDriver::pace(int stream, int64_t ns) {
  TORCH_CHECK(link_ != nullptr, "symm_overlap: pace without a link: call emulate_link first");
  on(stream);
  cuda::pace(link_->clock(), ns);
}

void CudaDriver::copy(int stream, char* to, const char* from, const issue::Rows& rows) {
  const auto count = static_cast<size_t>(rows.count);
  const auto bytes = static_cast<size_t>(rows.bytes);
  if (count * bytes == 0) {
    return;
  }
  if (link_ != nullptr && link_->paces_copies() && (is_of_peer(to) || is_of_peer(from))) {
    C10_CUDA_CHECK(link_->cross(count * bytes, is_of_peer(from), on(stream)));
    return;
  }
  if (count == 1) {
    C10_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, on(stream)));
    return;
  }
  C10_CUDA_CHECK(cudaMemcpy2DAsync(to, static_cast<size_t>(rows.to_stride), from, static_cast<size_t>(rows.from_stride),
                                   bytes, count, cudaMemcpyDefault, on(stream)));
}

void CudaDriver::copy_tensor(int stream, const at::Tensor& to, const at::Tensor& from) {
  on(stream);
  to.copy_(from);
}

at::Tensor CudaDriver::make(int stream, const at::Tensor& like, at::IntArrayRef sizes) {
  on(stream);  // the allocator takes the memory from this stream's pool, and returns it there
  return like.new_empty(sizes);
}

void CudaDriver::add(int stream, const at::Tensor& out, const at::Tensor& addend) {
  on(stream);
  out.add_(addend);
}

void CudaDriver::multiply(int stream, const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add,
                          const std::optional<at::Tensor>& bias) {
  on(stream);
  issue::multiply(a, b, out, add, bias);
}

void CudaDriver::multiply_scaled(int stream, const issue::Scaled& product, at::Tensor& out) {
  on(stream);
  issue::multiply_scaled(product, out);
}

void CudaDriver::sum(int stream, const std::vector<at::Tensor>& partials, bool average, const at::Tensor& out,
                     const at::Tensor& copy) {
  on(stream);
  reduce_partials(partials, average, out, copy.defined() ? std::optional(copy) : std::nullopt);
}

void CudaDriver::raise(int stream, issue::Flags& flags, int chunk) {
  dynamic_cast<CudaFlags&>(flags).raise(chunk, pending_on(stream));
}

void CudaDriver::await(int stream, issue::Flags& flags, int chunk) {
  dynamic_cast<CudaFlags&>(flags).await(chunk, pending_on(stream));
}

void CudaDriver::launch(int stream, const issue::Kernel& kernel, const std::vector<at::Tensor>& tensors) {
  launch_kernel(kernel, tensors, on(stream));
}

void CudaDriver::meet_and_sum(int stream, int channel, const std::vector<at::Tensor>& partials, bool average,
                              const at::Tensor& out, const at::Tensor& copy, std::optional<int> done_channel) {
  on(stream);
  lane_.meet_and_sum(channel, partials, average, out, copy, done_channel);
}

void CudaDriver::await_and_gather(int stream, int channel, const std::vector<int64_t>& from, int64_t part_bytes,
                                  const at::Tensor& out) {
  on(stream);
  lane_.await_and_gather(channel, from, part_bytes, out);
}

}  // namespace symm_overlap::cuda
