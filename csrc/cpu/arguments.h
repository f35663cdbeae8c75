// Checks of a call's arguments on the host, in one pass over them. Python would need microseconds for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <vector>

namespace symm_overlap::cpu {

// Returns equal bytes for arguments that are alike. Tensors are alike if they have the same sizes, dtype and device;
// their values, strides and addresses do not matter. Numbers, strings, dtypes and None are alike if they are equal.
// Lists and tuples are alike if their elements are alike, in the same order. The sizes of tensors must be known. Throws
// TypeError for an argument of another type, or of a subclass of int or str.
pybind11::bytes argument_key(pybind11::handle arguments);

// The same, but tensors are alike only if their strides, and their addresses modulo 16, are equal, too, and if a tensor
// that is passed twice in one call is passed twice, at the same places, in the other; and only calls that are both in
// inference mode, or both not, are alike. Such calls can be carried out in the same way.
pybind11::bytes call_key(pybind11::handle arguments);

// Returns the `call_key` of a call for which torch's dispatcher and its autograd layer would only call the kernel of
// the tensors' device. This is so if there are tensors, if all of them are plain tensors (a torch.Tensor or a
// Parameter, no other subclass) on CPU or CUDA of which no gradient can be requested later, and if nothing that is
// active in this thread (a mode, a transform, autocast, tracing, a profiler) must see the call. Returns nothing for any
// other call, and if an argument is of a type that has no key.
std::optional<pybind11::bytes> kernel_key(pybind11::handle arguments);

// Returns equal bytes for lists with None in the same places whose tensors have the same dtypes, devices, sizes and
// strides, if each address is a multiple of 16 in one list exactly if it is one in the other. A kernel that is compiled
// for a call, and the numbers that it gets, depend on all of these.
pybind11::bytes layout_key(const std::vector<std::optional<at::Tensor>>& tensors);

}  // namespace symm_overlap::cpu
