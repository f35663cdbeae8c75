#include "cpu/deadline.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace symm_overlap::cpu {

namespace {

constexpr double kLongest = 1e9;  // seconds, 30 years: far from any overflow

thread_local int64_t thread_timeout = 0;

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

}  // namespace

void set_thread_timeout_ms(int64_t timeout_ms) {
  thread_timeout = timeout_ms;
}

int64_t timeout_ms_or_default(int64_t argument) {
  if (argument > 0) {
    return argument;
  }
  return thread_timeout > 0 ? thread_timeout : process_timeout_ms();
}

}  // namespace symm_overlap::cpu
