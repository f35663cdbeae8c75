// What the host asks of a call's arguments, in one pass over them: Python would take microseconds.
#pragma once

#include <pybind11/pybind11.h>

namespace symm_overlap::cpu {

// Whether every tensor among the arguments, and in lists and tuples of them, is a plain one (a torch.Tensor or a
// Parameter, no other subclass) that does not require a gradient.
bool plain_without_gradient(pybind11::handle arguments);

// Whether torch's dispatcher would call the kernel of the tensors' device for these arguments, and nothing else: there
// are tensors, plain ones on CPU or CUDA, and nothing that is on in this thread (a mode, a transform, autocast,
// tracing, a profiler) wants to see the call. Asked where the autograd layer is left out.
bool nothing_before_kernel(pybind11::handle arguments);

// Equal bytes for arguments that are alike: tensors of the same sizes, dtype and device, whatever their numbers,
// strides and places in memory; equal numbers, strings and None; lists and tuples of such in the same order. Tensors
// have sizes that are known. Throws TypeError for an argument of another type, or of a subclass of int or str.
pybind11::bytes likeness(pybind11::handle arguments);

}  // namespace symm_overlap::cpu
