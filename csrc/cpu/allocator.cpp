#include "cpu/allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <optional>
#include <utility>

#include "cpu/rendezvous.h"
#include "cpu/without_gil.h"

namespace symm_overlap::cpu {

namespace symm = c10d::symmetric_memory;

void* CpuAllocator::alloc(size_t size, int /*device_idx*/, const std::optional<std::string>& group_name) {
  auto object = std::make_shared<SharedObject>(SharedObject::create(std::max<size_t>(size, 1), "a symmetric tensor"));
  void* ptr = object->data();
  c10::profiledCPUMemoryReporter().New(ptr, size);  // a memory profile shows it like the memory of any tensor
  const std::lock_guard lock(mutex_);
  blocks_.emplace(ptr, Block{size, std::move(object), group_name, {}});
  return ptr;
}

void CpuAllocator::free(void* ptr) {
  Block freed;  // unmapped after the lock is released; handles that the user still holds keep the memory alive
  const std::lock_guard lock(mutex_);
  if (auto found = blocks_.find(ptr); found != blocks_.end()) {
    c10::profiledCPUMemoryReporter().Delete(ptr);
    freed = std::move(found->second);
    blocks_.erase(found);
  }
}

size_t CpuAllocator::get_alloc_size(void* ptr) {
  const std::lock_guard lock(mutex_);
  auto found = blocks_.find(ptr);
  TORCH_CHECK_VALUE(found != blocks_.end(), "symm_overlap: this pointer is not CPU symmetric memory");
  return found->second.bytes;
}

bool CpuAllocator::has_allocation(void* ptr) {
  const std::lock_guard lock(mutex_);
  return blocks_.count(ptr) != 0;
}

c10::intrusive_ptr<CpuSymmetricMemory> CpuAllocator::find_locked(void* ptr, const std::string& group_name,
                                                                 const c10d::ProcessGroup& group) {
  auto block = blocks_.find(ptr);
  if (block == blocks_.end()) {
    return {};
  }
  auto handle = block->second.handles.find(group_name);
  if (handle == block->second.handles.end() || handle->second.group._unsafe_get_target() != &group) {
    return {};
  }
  return handle->second.memory;
}

c10::intrusive_ptr<CpuSymmetricMemory> CpuAllocator::find(void* ptr, const std::string& group_name) {
  {
    const std::lock_guard lock(mutex_);
    if (blocks_.count(ptr) == 0) {
      return {};
    }
  }
  const auto group = c10d::resolve_process_group(group_name);
  const std::lock_guard lock(mutex_);
  return find_locked(ptr, group_name, *group);
}

c10::intrusive_ptr<symm::SymmetricMemory> CpuAllocator::rendezvous(void* ptr,
                                                                   const std::optional<std::string>& group_name) {
  return rendezvous_tagged(ptr, group_name, "");
}

c10::intrusive_ptr<symm::SymmetricMemory> CpuAllocator::rendezvous_tagged(void* ptr,
                                                                          const std::optional<std::string>& group_name,
                                                                          const std::string& tag) {
  const WithoutGil without_gil;
  std::shared_ptr<SharedObject> object;
  size_t bytes = 0;
  std::string name;
  {
    const std::lock_guard lock(mutex_);
    auto block = blocks_.find(ptr);
    if (block == blocks_.end()) {
      return {};
    }
    TORCH_CHECK_VALUE(group_name || block->second.group_name,
                      "symm_overlap: rendezvous needs a group name: none was given here or at the allocation");
    name = group_name ? *group_name : *block->second.group_name;
    object = block->second.object;
    bytes = block->second.bytes;
  }
  // Do not use torch's own map of group infos: it keeps the first group of a name forever.
  const auto group = c10d::resolve_process_group(name);
  {
    const std::lock_guard lock(mutex_);
    if (auto memory = find_locked(ptr, name, *group)) {
      return memory;
    }
  }
  auto memory = rendezvous_group(*group, name, tag, std::move(object), bytes, [&] { without_gil.check_signals(); });
  Handle replaced{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), memory};  // unmapped after the lock is released
  const std::lock_guard lock(mutex_);
  if (auto block = blocks_.find(ptr); block != blocks_.end()) {
    std::swap(block->second.handles.try_emplace(name, replaced).first->second, replaced);
  }
  return memory;
}

bool CpuAllocator::has_multicast_support(int /*device_idx*/) {
  return false;
}

c10::DeviceType CpuAllocator::supported_device_type() {
  return c10::kCPU;
}

std::string CpuAllocator::name() {
  return "symm_overlap";
}

CpuAllocator& cpu_allocator() {
  // Never destroyed: tensors may outlive every static object.
  static auto* allocator = new c10::intrusive_ptr<CpuAllocator>(c10::make_intrusive<CpuAllocator>());
  return **allocator;
}

void register_cpu_allocator() {
  symm::register_allocator(
      c10::kCPU, c10::intrusive_ptr<symm::SymmetricMemoryAllocator>::unsafe_reclaim_from_nonowning(&cpu_allocator()));
}

}  // namespace symm_overlap::cpu
