// A scope of code that does not need the GIL, often because it waits for peers. A peer may depend on another thread of
// this very process, so the GIL is released. Ctrl-C must still end the wait.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>

#include <optional>

namespace symm_overlap::cpu {

class __attribute__((visibility("hidden"))) WithoutGil {
 public:
  // Releases the GIL if the caller holds it. While the interpreter ends, only the thread that ends it has the GIL. That
  // thread keeps it, because it could not be told from the other threads when it acquires the GIL again.
  WithoutGil();
  // Acquires the GIL again. If the interpreter has ended in the meantime, a daemon thread stays here until the process
  // exits: Python would end that thread by unwinding its stack, and C++ calls std::terminate when that reaches a
  // destructor.
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

  // Runs Python's signal handlers and throws the exceptions that they raise. Python runs them only in the main thread.
  void check_signals() const;

 private:
  PyThreadState* state_ = nullptr;
};

// A scope of code that reads something of Python's, also inside a `WithoutGil`. It is false if the interpreter ends,
// and the GIL belongs to another thread for good.
class __attribute__((visibility("hidden"))) WithGil {
 public:
  WithGil();
  ~WithGil();
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

  explicit operator bool() const { return has_; }

 private:
  bool has_ = false;
  std::optional<PyGILState_STATE> taken_;
};

}  // namespace symm_overlap::cpu
