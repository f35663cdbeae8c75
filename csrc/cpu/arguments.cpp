#include "cpu/arguments.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace symm_overlap::cpu {

namespace {

bool is_sequence(PyObject* object) {
  return PyTuple_Check(object) || PyList_Check(object);
}

// Each kind of argument begins with its own byte. Arguments of variable length also store their length. So different
// arguments give different bytes.
void append(std::string& key, int64_t number) {
  key.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

void append(std::string& key, const at::Tensor& tensor) {
  key += 'T';
  key += static_cast<char>(tensor.scalar_type());
  key += static_cast<char>(tensor.device().type());
  key += static_cast<char>(tensor.device().index());
  append(key, tensor.dim());
  for (const int64_t size : tensor.sizes()) {
    append(key, size);
  }
}

// Returns by how many bytes the address exceeds a multiple of 16.
char append_layout(std::string& key, const at::Tensor& tensor) {
  append(key, tensor);
  for (const int64_t stride : tensor.strides()) {
    append(key, stride);
  }
  return static_cast<char>(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16);
}

// `seen`: the tensors so far, if layouts count; null if they do not.
void append(std::string& key, PyObject* argument, std::vector<PyObject*>* seen = nullptr) {
  if (THPVariable_Check(argument)) {
    if (seen == nullptr) {
      append(key, THPVariable_Unpack(argument));
      return;
    }
    key += append_layout(key, THPVariable_Unpack(argument));
    const auto first = std::find(seen->begin(), seen->end(), argument);
    append(key, first - seen->begin());
    seen->push_back(argument);
  } else if (argument == Py_None) {
    key += 'N';
  } else if (PyBool_Check(argument)) {
    key += argument == Py_True ? 'Y' : 'Z';
  } else if (PyLong_CheckExact(argument)) {
    int overflow = 0;
    const int64_t number = PyLong_AsLongLongAndOverflow(argument, &overflow);
    TORCH_CHECK_TYPE(overflow == 0, "symm_overlap: a number of more than 64 bits has no argument key");
    key += 'I';
    append(key, number);
  } else if (PyUnicode_CheckExact(argument)) {
    Py_ssize_t length = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(argument, &length);
    if (text == nullptr) {
      PyErr_Clear();
      TORCH_CHECK_TYPE(false, "symm_overlap: a text with half of a surrogate pair has no argument key");
    }
    key += 'S';
    append(key, length);
    key.append(text, length);
  } else if (THPDtype_Check(argument)) {
    key += 'D';
    key += static_cast<char>(reinterpret_cast<THPDtype*>(argument)->scalar_type);
  } else if (is_sequence(argument)) {
    const Py_ssize_t length = PySequence_Fast_GET_SIZE(argument);
    // torch turns tuples into lists. So a call with a tuple cannot be carried out in the same way as one with a list.
    key += seen != nullptr && PyTuple_Check(argument) ? 'U' : 'L';
    append(key, length);
    for (Py_ssize_t i = 0; i < length; ++i) {
      append(key, PySequence_Fast_GET_ITEM(argument, i), seen);
    }
  } else {
    TORCH_CHECK_TYPE(false, "symm_overlap: an argument of type ", Py_TYPE(argument)->tp_name, " has no argument key");
  }
}

// Adds the dispatch keys of all tensors among the arguments to `keys`. Returns false if a tensor is of a subclass, has
// a tangent, or requires a gradient where gradients are enabled.
bool collect(c10::DispatchKeySet& keys, PyObject* object) {
  if (is_sequence(object)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      if (!collect(keys, PySequence_Fast_GET_ITEM(object, i))) {
        return false;
      }
    }
    return true;
  }
  if (THPVariable_Check(object)) {
    if (!THPVariable_CheckExact(object)) {
      return false;
    }
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if ((tensor.requires_grad() && c10::GradMode::is_enabled()) || torch::autograd::isFwGradDefined(tensor)) {
      return false;
    }
    keys = keys | tensor.key_set();
  }
  return true;
}

bool dispatches_to_kernel_only(PyObject* arguments) {
  if (at::hasCallbacks() || at::impl::PythonTorchFunctionTLS::stack_len() > 0) {
    return false;
  }
  c10::DispatchKeySet keys;
  if (!collect(keys, arguments)) {
    return false;
  }
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  // No gradient can be requested later. Every thread includes the key BackendSelect, for which ops that are defined in
  // Python have no kernel.
  const c10::DispatchKeySet passed =
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
  const c10::DispatchKeySet asked = (keys | local.included_) - local.excluded_ - passed;
  const c10::DispatchKey first = asked.highestPriorityTypeId();
  return first == c10::DispatchKey::CPU || first == c10::DispatchKey::CUDA;
}

}  // namespace

pybind11::bytes argument_key(pybind11::handle arguments) {
  std::string key;
  key.reserve(256);
  append(key, arguments.ptr());
  return pybind11::bytes(key);
}

pybind11::bytes call_key(pybind11::handle arguments) {
  std::string key;
  key.reserve(512);
  key += c10::InferenceMode::is_enabled() ? 'I' : '-';
  std::vector<PyObject*> seen;
  seen.reserve(8);
  append(key, arguments.ptr(), &seen);
  return pybind11::bytes(key);
}

std::optional<pybind11::bytes> kernel_key(pybind11::handle arguments) {
  if (!dispatches_to_kernel_only(arguments.ptr())) {
    return std::nullopt;
  }
  try {
    return call_key(arguments);
  } catch (const c10::TypeError&) {  // an argument that only the dispatcher can handle
    return std::nullopt;
  }
}

pybind11::bytes layout_key(const std::vector<std::optional<at::Tensor>>& tensors) {
  std::string key;
  key.reserve(512);
  for (const std::optional<at::Tensor>& tensor : tensors) {
    if (!tensor) {
      key += 'N';
      continue;
    }
    key += append_layout(key, *tensor) == 0 ? 'A' : 'U';
  }
  return pybind11::bytes(key);
}

}  // namespace symm_overlap::cpu
