#include "cpu/output_memory.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <c10/util/error.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace symm_overlap::cpu {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kMostKept = size_t{256} << 20;  // beyond this, the oldest blocks are released to the system

struct Block {
  void* data;
  size_t bytes;
};

void release(const Block& block) {
  (void)::munmap(block.data, block.bytes);
}

// Returns fresh memory that is aligned to large pages, or null with errno set.
void* map(size_t bytes) {
  void* const mapped = ::mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    return nullptr;
  }
  auto* const begin = static_cast<char*>(mapped);
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  auto* const data = begin + before;
  if (before > 0) {
    (void)::munmap(begin, before);
  }
  (void)::munmap(data + bytes, kHugePage - before);
  (void)::madvise(data, bytes, MADV_HUGEPAGE);  // a hint: no effect if large pages are disabled on the system
  return data;
}

class OutputAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t wanted) override {
    const size_t bytes = std::max<size_t>(1, (wanted + kHugePage - 1) / kHugePage) * kHugePage;
    void* data = take(bytes);
    if (data == nullptr) {
      data = map(bytes);
    }
    if (data == nullptr) {
      give_all_back();
      data = map(bytes);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr, "cannot allocate ", bytes,
                     " bytes for the output of an op: ", c10::utils::str_error(errno));
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, new Block{data, bytes}, &OutputAllocator::free, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  size_t kept() {
    const std::lock_guard lock(mutex_);
    return kept_bytes_;
  }

  void give_all_back() { give_back_above(0); }

 private:
  static void free(void* context);

  void* take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    // Use the youngest block: its pages are the most likely to be still in memory.
    const auto found =
        std::find_if(kept_.rbegin(), kept_.rend(), [&](const Block& each) { return each.bytes == bytes; });
    if (found == kept_.rend()) {
      return nullptr;
    }
    void* const data = found->data;
    kept_.erase(std::next(found).base());
    kept_bytes_ -= bytes;
    return data;
  }

  void keep(const Block& block) {
    // From here on the system may reclaim the pages. A page that is written again before that stays, without a fault.
    if (block.bytes > kMostKept || ::madvise(block.data, block.bytes, MADV_FREE) != 0) {
      release(block);
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      kept_.push_back(block);
      kept_bytes_ += block.bytes;
    }
    give_back_above(kMostKept);
  }

  void give_back_above(size_t limit) {
    std::vector<Block> too_many;
    {
      const std::lock_guard lock(mutex_);
      for (; kept_bytes_ > limit; kept_.pop_front()) {
        too_many.push_back(kept_.front());
        kept_bytes_ -= kept_.front().bytes;
      }
    }
    std::for_each(too_many.begin(), too_many.end(), release);
  }

  std::mutex mutex_;
  std::deque<Block> kept_;  // by age
  size_t kept_bytes_ = 0;
};

OutputAllocator& allocator() {
  static auto* const instance = new OutputAllocator;  // never destroyed: tensors may outlive static objects
  return *instance;
}

void OutputAllocator::free(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  c10::profiledCPUMemoryReporter().Delete(block->data);
  allocator().keep(*block);
}

}  // namespace

at::Tensor new_output(const at::Tensor& like, at::IntArrayRef shape) {
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    return at::empty(shape, like.options());  // let the mode decide, for example a mode for tensors without data
  }
  RECORD_FUNCTION("symm_overlap::new_output", std::vector<c10::IValue>());
  const auto bytes = static_cast<size_t>(c10::multiply_integers(shape)) * like.element_size();
  if (bytes < kLarge) {
    // Bypass the dispatcher, which takes longer than the rest. But if deterministic algorithms are enabled, use
    // torch.empty, which then fills the memory so that errors are reproducible.
    return at::globalContext().deterministicAlgorithms() ? at::empty(shape, like.options())
                                                         : at::detail::empty_cpu(shape, like.scalar_type());
  }
  return at::detail::empty_generic(shape, &allocator(), c10::DispatchKeySet(c10::DispatchKey::CPU), like.scalar_type(),
                                   std::nullopt);
}

void release_kept_outputs() {
  allocator().give_all_back();
}

size_t kept_output_bytes() {
  return allocator().kept();
}

}  // namespace symm_overlap::cpu
