#include "cpu/onednn_shapes.h"

#include <ATen/Parallel.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <set>

namespace symm_overlap::cpu {

namespace {

// Everything that the code depends on: three sizes, two strides each of a and b, one stride of out, whether it adds,
// and the number of threads.
using Key = std::array<int64_t, 10>;

std::mutex keys_mutex;

std::set<Key>& keys() {
  static auto* const all = new std::set<Key>;  // never destroyed: threads may multiply until the process exits
  return *all;
}

}  // namespace

bool onednn_may_have(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out, bool add) {
  const Key key{a.size(0),   a.size(1),   b.size(1),     a.stride(0), a.stride(1),
                b.stride(0), b.stride(1), out.stride(0), add,         at::get_num_threads()};
  const std::lock_guard lock(keys_mutex);
  if (keys().count(key) != 0) {
    return true;
  }
  return keys().size() < kMostOnednnShapes && keys().insert(key).second;
}

void forget_onednn_shapes() {
  const std::lock_guard lock(keys_mutex);
  keys().clear();
}

}  // namespace symm_overlap::cpu
