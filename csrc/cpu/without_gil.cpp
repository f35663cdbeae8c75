#include "cpu/without_gil.h"

#include <cxxabi.h>
#include <unistd.h>

namespace symm_overlap::cpu {

namespace {

bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

[[noreturn]] void stay_until_the_process_exits() {
  while (true) {
    ::pause();
  }
}

template <typename Acquire>
void acquire(const Acquire& acquire_gil) {
  if (interpreter_ends()) {
    stay_until_the_process_exits();
  }
  try {
    acquire_gil();
  } catch (const abi::__forced_unwind&) {
    // The interpreter has ended after interpreter_ends() was called. Up to Python 3.13, it then calls pthread_exit,
    // which arrives here as an exception. This exception must not be swallowed, but its handler may run forever.
    stay_until_the_process_exits();
  }
}

}  // namespace

WithoutGil::WithoutGil() {
  if (!interpreter_ends() && PyGILState_Check() != 0) {
    state_ = PyEval_SaveThread();
  }
}

WithoutGil::~WithoutGil() {
  if (state_ != nullptr) {
    acquire([this] { PyEval_RestoreThread(state_); });
  }
}

void WithoutGil::check_signals() const {
  if (state_ == nullptr) {
    return;
  }
  acquire([this] { PyEval_RestoreThread(state_); });
  struct Released {
    ~Released() { (void)PyEval_SaveThread(); }
  } const released_at_the_end;
  if (PyErr_CheckSignals() != 0) {
    throw pybind11::error_already_set();
  }
}

WithGil::WithGil() {
  if (Py_IsInitialized() == 0) {
    return;
  }
  if (PyGILState_Check() == 0) {
    if (interpreter_ends()) {
      return;
    }
    acquire([this] { taken_ = PyGILState_Ensure(); });
  }
  has_ = true;
}

WithGil::~WithGil() {
  if (taken_) {
    PyGILState_Release(*taken_);
  }
}

}  // namespace symm_overlap::cpu
