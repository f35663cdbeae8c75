#include "cpu/deadline.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "cpu/without_gil.h"

namespace symm_overlap::cpu {

namespace {

constexpr double kLongest = 1e9;  // seconds, 30 years: far from any overflow

PyObject* variable = nullptr;  // never freed: threads may wait until the process exits

int64_t context_timeout_ms() {
  const WithGil with_gil;
  if (!with_gil) {
    return 0;
  }
  PyObject* value = nullptr;
  if (PyContextVar_Get(variable, nullptr, &value) < 0) {
    throw pybind11::error_already_set();
  }
  return pybind11::reinterpret_steal<pybind11::int_>(value).cast<int64_t>();
}

}  // namespace

pybind11::object new_timeout_variable() {
  const pybind11::int_ none(0);
  variable = PyContextVar_New("symm_overlap timeout in milliseconds", none.ptr());
  if (variable == nullptr) {
    throw pybind11::error_already_set();
  }
  return pybind11::reinterpret_borrow<pybind11::object>(variable);
}

int64_t process_timeout_ms() {
  static const int64_t timeout = [] {
    const char* set = std::getenv("SYMM_OVERLAP_TIMEOUT");
    if (set == nullptr || *set == '\0') {
      return int64_t{300'000};
    }
    char* end = nullptr;
    const double seconds = std::strtod(set, &end);
    TORCH_CHECK_VALUE(*end == '\0' && seconds > 0 && seconds <= kLongest,
                      "SYMM_OVERLAP_TIMEOUT must be a number of seconds above 0 and up to ", kLongest, ", not '", set,
                      "'");
    return std::max<int64_t>(1, std::llround(seconds * 1000));
  }();
  return timeout;
}

int64_t timeout_ms_or_default(int64_t argument) {
  if (argument > 0) {
    return argument;
  }
  const int64_t set = context_timeout_ms();
  return set > 0 ? set : process_timeout_ms();
}

}  // namespace symm_overlap::cpu
