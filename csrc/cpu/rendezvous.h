// The rendezvous, in which the ranks of a group map each other's buffers. They exchange the addresses once, through the
// group's store.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <memory>
#include <string>

#include "cpu/shared_object.h"
#include "cpu/symmetric_memory.h"

namespace symm_overlap::cpu {

// Collective. Either every rank gets its handle, or every rank throws an error that names the rank that differs or has
// failed. Calls with the same tag follow one another in the same order on every rank. Calls with different tags may
// overlap. `idle` can end the wait for peers by throwing.
c10::intrusive_ptr<CpuSymmetricMemory> rendezvous_group(c10d::ProcessGroup& group, const std::string& group_name,
                                                        const std::string& tag, std::shared_ptr<SharedObject> buffer,
                                                        size_t buffer_bytes, const std::function<void()>& idle);

// Called instead of a rendezvous by a rank that has no memory to share. Its peers throw an error with the reason.
void refuse_rendezvous(c10d::ProcessGroup& group, const std::string& group_name, const std::string& tag,
                       const std::string& reason);

}  // namespace symm_overlap::cpu
