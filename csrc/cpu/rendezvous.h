// How the ranks of a group come to map each other's buffers: addresses go through the group's store, once.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <memory>
#include <string>

#include "cpu/shared_object.h"
#include "cpu/symmetric_memory.h"

namespace symm_overlap::cpu {

// Collective. Every rank gets its handle, or every rank throws and says which rank differs or failed. Calls with one
// tag follow one another in the same order on every rank; those with different tags may overlap. `idle` ends the wait
// for peers by throwing.
c10::intrusive_ptr<CpuSymmetricMemory> rendezvous_group(c10d::ProcessGroup& group, const std::string& group_name,
                                                        const std::string& tag, std::shared_ptr<SharedObject> buffer,
                                                        size_t buffer_bytes, const std::function<void()>& idle);

// In place of a rendezvous, by a rank that has nothing to bring: its peers throw with the reason.
void refuse_rendezvous(c10d::ProcessGroup& group, const std::string& group_name, const std::string& tag,
                       const std::string& reason);

}  // namespace symm_overlap::cpu
