// The allocator behind torch.distributed._symmetric_memory.empty(..., device="cpu").
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "cpu/shared_object.h"
#include "cpu/symmetric_memory.h"

namespace symm_overlap::cpu {

class CpuAllocator : public c10d::symmetric_memory::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int device_idx, const std::optional<std::string>& group_name) override;
  void free(void* ptr) override;
  size_t get_alloc_size(void* ptr) override;
  // Collective over the group. Returns null if `ptr` is not symmetric memory, as torch's own allocators do.
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> rendezvous(
      void* ptr, const std::optional<std::string>& group_name) override;
  // The same, but matched only with rendezvous of the same `tag`. Without tags, if several threads have a rendezvous,
  // the call of one thread could meet the call of another thread on a peer.
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> rendezvous_tagged(
      void* ptr, const std::optional<std::string>& group_name, const std::string& tag);
  bool has_multicast_support(int device_idx) override;
  c10::DeviceType supported_device_type() override;
  std::string name() override;
  bool has_allocation(void* ptr);  // an override from torch 2.12 on

  // Returns the handle of an earlier rendezvous, without communication; null if there was none.
  c10::intrusive_ptr<CpuSymmetricMemory> find(void* ptr, const std::string& group_name);

 private:
  struct Handle {
    // Identifies the group: a group that was destroyed and created again with the same name is another group.
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    c10::intrusive_ptr<CpuSymmetricMemory> memory;
  };
  struct Block {
    size_t bytes;
    std::shared_ptr<SharedObject> object;
    std::optional<std::string> group_name;
    std::map<std::string, Handle> handles;
  };

  c10::intrusive_ptr<CpuSymmetricMemory> find_locked(void* ptr, const std::string& group_name,
                                                     const c10d::ProcessGroup& group);

  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
};

// The one allocator of this process.
CpuAllocator& cpu_allocator();
// Makes torch use this allocator for CPU tensors. Called once, on import.
void register_cpu_allocator();

}  // namespace symm_overlap::cpu
