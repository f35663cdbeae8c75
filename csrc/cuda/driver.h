// Carries out programs on a GPU. It enqueues work on the caller's stream and on side streams, and never blocks the
// host.
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cpu/without_gil.h"
#include "cuda/emulated_link.h"
#include "cuda/lane_host.h"
#include "issue/driver.h"

namespace symm_overlap::cuda {

// One instance for each lane. The caller's stream is the stream that is current when a program's first items are
// issued.
class __attribute__((visibility("hidden"))) CudaDriver final : public issue::Driver {
 public:
  // `sleep_cycles`: the length of every sleep. The lane must outlive the driver.
  CudaDriver(LaneHost& lane, int64_t sleep_cycles);

  // Returns the number of a side stream, given the handle that torch.cuda.ExternalStream accepts.
  int number_of(int64_t handle);
  // Creates events 0 to count - 1. They are never destroyed, because captured graphs may refer to them.
  void reserve_events(int count);
  // From now on `peers` is the memory of ranks behind a link.
  void emulate_link(std::shared_ptr<EmulatedLink> link, const std::vector<at::Tensor>& peers);

  void begin() override;
  void flush() override;
  void end() noexcept override;
  void abandon() noexcept override;
  void enter(int stream) override;
  void signal(int stream, const std::vector<int>& peers, int channel) override;
  void wait(int stream, const std::vector<int>& peers, int channel) override;
  void barrier(int stream, int channel) override;
  void sleep(int stream) override;
  void record(int stream, int event) override;
  void follow(int stream, int event) override;
  void pace(int stream, int64_t ns) override;
  void copy(int stream, char* to, const char* from, const issue::Rows& rows) override;
  void copy_tensor(int stream, const at::Tensor& to, const at::Tensor& from) override;
  at::Tensor make(int stream, const at::Tensor& like, at::IntArrayRef sizes) override;
  void add(int stream, const at::Tensor& out, const at::Tensor& addend) override;
  void multiply_scaled(int stream, const issue::Scaled& product, at::Tensor& out) override;
  void multiply(int stream, const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add,
                const std::optional<at::Tensor>& bias) override;
  void sum(int stream, const std::vector<at::Tensor>& partials, bool average, const at::Tensor& out,
           const at::Tensor& copy) override;
  void raise(int stream, issue::Flags& flags, int chunk) override;
  void await(int stream, issue::Flags& flags, int chunk) override;
  void launch(int stream, const issue::Kernel& kernel, const std::vector<at::Tensor>& tensors) override;
  bool has_fused_meetings() const override { return true; }
  void meet_and_sum(int stream, int channel, const std::vector<at::Tensor>& partials, bool average,
                    const at::Tensor& out, const at::Tensor& copy, std::optional<int> done_channel) override;
  void await_and_gather(int stream, int channel, const std::vector<int64_t>& from, int64_t part_bytes,
                        const at::Tensor& out) override;

 private:
  // Makes a stream the current one, for copies, kernels, matmuls and Python.
  cudaStream_t on(int stream);
  bool is_of_peer(const char* address) const;
  // Makes a stream the current one, for operations that may be added to those pending there.
  PendingOperations& pending_on(int stream);

  LaneHost& lane_;
  int64_t sleep_cycles_;
  c10::DeviceIndex device_;
  std::vector<c10::cuda::CUDAStream> streams_;  // the first is the caller's stream of the current call
  std::vector<bool> used_;
  std::vector<cudaEvent_t> events_;
  std::shared_ptr<EmulatedLink> link_;
  std::vector<std::pair<const char*, const char*>> peers_;  // where the memory of each emulated peer begins and ends
  int current_ = 0;
  PendingOperations pending_;  // of the current stream
  bool entered_ = false;       // Python is in the middle of a call
  // A launch blocks while the GPU's queue is full. The queue may hold waits for work that another thread has yet to
  // launch, so the GIL is released.
  std::optional<cpu::WithoutGil> without_gil_;
  std::optional<c10::cuda::CUDAGuard> guard_;
};

}  // namespace symm_overlap::cuda
