// A stretch of code that does not need the GIL, often one that waits for peers. A peer may depend on another thread of
// this very process, so the GIL is released; and Ctrl-C must end the wait.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>

namespace symm_overlap::cpu {

class __attribute__((visibility("hidden"))) WithoutGil {
 public:
  // Callers of C++ may have the GIL or not; both are fine. While the interpreter ends, only the thread that ends it has
  // the GIL. That thread keeps it, because it could not tell itself from the others when it wants it back.
  WithoutGil();
  // Takes the GIL back. A daemon thread for which the interpreter has ended meanwhile stays here until the process
  // exits: Python would end that thread by unwinding its stack, and C++ calls std::terminate when that meets a
  // destructor.
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

  // Runs Python's signal handlers, and throws what they raise. Python runs them in the main thread only.
  void check_signals() const;

 private:
  void take() const;

  PyThreadState* state_ = nullptr;
};

}  // namespace symm_overlap::cpu
