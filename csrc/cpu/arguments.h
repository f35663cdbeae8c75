// Checks of a call's arguments on the host, in one pass over them. Python would need microseconds for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <vector>

namespace symm_overlap::cpu {

// Whether every tensor among the arguments, and in lists and tuples among them, is a plain tensor (a torch.Tensor or a
// Parameter, no other subclass) that does not require a gradient.
bool plain_tensors_without_grad(pybind11::handle arguments);

// Whether torch's dispatcher would call only the kernel of the tensors' device for these arguments. This is so if there
// are tensors, all of them are plain tensors on CPU or CUDA, and nothing that is active in this thread (a mode, a
// transform, autocast, tracing, a profiler) must see the call. Used for calls that leave out the autograd layer.
bool dispatches_to_kernel_only(pybind11::handle arguments);

// Returns equal bytes for arguments that are alike. Tensors are alike if they have the same sizes, dtype and device;
// their values, strides and addresses do not matter. Numbers, strings, dtypes and None are alike if they are equal.
// Lists and tuples are alike if their elements are alike, in the same order. The sizes of tensors must be known. Throws
// TypeError for an argument of another type, or of a subclass of int or str.
pybind11::bytes argument_key(pybind11::handle arguments);

// The same, but tensors are alike only if their strides, and their addresses modulo 16, are equal, too, and if a tensor
// that is passed twice in one call is passed twice, at the same places, in the other. Such calls can be carried out in
// the same way.
pybind11::bytes call_key(pybind11::handle arguments);

// Returns equal bytes for lists with None in the same places whose tensors have the same dtypes, devices, sizes and
// strides, if each address is a multiple of 16 in one list exactly if it is one in the other. A kernel that is compiled
// for a call, and the numbers that it gets, depend on all of these.
pybind11::bytes layout_key(const std::vector<std::optional<at::Tensor>>& tensors);

}  // namespace symm_overlap::cpu
