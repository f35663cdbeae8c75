// A view of an array that is owned elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>

namespace symm_overlap::sim {

template <typename T>
struct View {
  const T* begin;
  size_t size;
  const T& operator[](size_t index) const { return begin[index]; }
};

using Integers = View<int64_t>;
using Doubles = View<double>;

}  // namespace symm_overlap::sim
