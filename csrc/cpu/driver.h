// Carries out programs on CPU. There is one stream, and each item is carried out at once in the calling thread.
#pragma once

#include "cpu/lane.h"
#include "issue/driver.h"

namespace symm_overlap::cpu {

class CpuDriver final : public issue::Driver {
 public:
  explicit CpuDriver(CpuLane& lane) : lane_(lane) {}

  void enter(int) override {}
  void signal(int, const std::vector<int>& peers, int channel) override;
  void wait(int, const std::vector<int>& peers, int channel) override;  // throws what CpuLane::wait throws
  void barrier(int, int channel) override { lane_.barrier(channel); }
  void sleep(int) override {}  // there is no other stream that could start in the meantime
  void record(int, int) override {}
  void follow(int, int) override {}
  void copy(int, char* to, const char* from, const issue::Rows& rows) override;
  // See cpu/copy.h, cpu/matmul.h and cpu/reduce.h.
  void copy_tensor(int, const at::Tensor& to, const at::Tensor& from) override;
  at::Tensor make(int, const at::Tensor& like, at::IntArrayRef sizes) override;
  void add(int, const at::Tensor& out, const at::Tensor& addend) override;
  void multiply_scaled(int, const issue::Scaled& product, at::Tensor& out) override;
  void multiply(int, const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add,
                const std::optional<at::Tensor>& bias) override;
  void sum(int, const std::vector<at::Tensor>& partials, bool average, const at::Tensor& out,
           const at::Tensor& copy) override;

 private:
  CpuLane& lane_;
};

}  // namespace symm_overlap::cpu
