// How the ranks of a group come to map each other's buffers: names go through the group's store, once.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <string>

#include "cpu/shared_object.h"
#include "cpu/symmetric_memory.h"

namespace symm_overlap::cpu {

// Collective. Either every rank gets its handle, or every rank throws and says which rank differs or failed.
c10::intrusive_ptr<CpuSymmetricMemory> rendezvous_group(
    c10d::ProcessGroup& group,
    const std::string& group_name,
    std::shared_ptr<SharedObject> buffer,
    size_t buffer_bytes);

} // namespace symm_overlap::cpu
