// The torch op of csrc/cuda: symm_overlap::reduce_partials.
#include "cuda/ops.h"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>

#include "cuda/kernels.h"

namespace symm_overlap::cuda {
namespace {

Dtype dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kDouble:
      return Dtype::kFloat64;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    case at::kHalf:
      return Dtype::kFloat16;
    default:
      TORCH_CHECK_TYPE(false, "reduce_partials takes float32, float64, bfloat16 and float16; got ",
                       tensor.scalar_type());
  }
}

void check_size(const at::Tensor& tensor, const at::Tensor& out, const char* what) {
  TORCH_CHECK_VALUE(tensor.numel() == out.numel(), "reduce_partials: ", what, " must have the ", out.numel(),
                    " elements of out; got ", tensor.numel());
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "reduce_partials: ", what, " must be contiguous; got strides ",
                    tensor.strides(), " for sizes ", tensor.sizes());
}

void check_dtype(const at::Tensor& tensor, at::ScalarType dtype, const char* what) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == dtype, "reduce_partials: ", what, " must be ", dtype, "; got ",
                    tensor.scalar_type());
}

void check_device(const at::Tensor& tensor, const at::Tensor& out, const char* what) {
  TORCH_CHECK_VALUE(tensor.device() == out.device(), "reduce_partials: ", what, " must be on ", out.device(),
                    ", as out is; got ", tensor.device());
}

// For tensors without data, there is nothing to compute, and the outputs belong to the caller.
void reduce_partials_meta(at::TensorList, bool, const at::Tensor&, const std::optional<at::Tensor>&) {}

}  // namespace

Sum checked_sum(at::TensorList partials, const at::Tensor& out, const at::Tensor& copy) {
  TORCH_CHECK_VALUE(!partials.empty() && partials.size() <= kMaxPartials, "reduce_partials takes 1 to ", kMaxPartials,
                    " partials; got ", partials.size());
  Sum sum{{dtype_of(partials[0]), dtype_of(out)}, {}};
  for (const at::Tensor& partial : partials) {
    check_dtype(partial, partials[0].scalar_type(), "a partial");
    check_size(partial, out, "a partial");
    sum.partials.items[sum.partials.count++] = partial.const_data_ptr();
  }
  const bool half = sum.dtypes.partials == Dtype::kBFloat16 || sum.dtypes.partials == Dtype::kFloat16;
  if (!half || sum.dtypes.out != Dtype::kFloat32) check_dtype(out, partials[0].scalar_type(), "out");
  check_size(out, out, "out");
  if (copy.defined()) {
    check_dtype(copy, out.scalar_type(), "copy");
    check_size(copy, out, "copy");
    check_device(copy, out, "copy");
  }
  return sum;
}

void reduce_partials(at::TensorList partials, bool average, const at::Tensor& out,
                     const std::optional<at::Tensor>& copy) {
  const Sum sum = checked_sum(partials, out, copy.value_or(at::Tensor()));
  for (const at::Tensor& partial : partials) check_device(partial, out, "a partial");
  c10::cuda::CUDAGuard guard(out.device());
  C10_CUDA_CHECK(launch_reduce(sum.partials, sum.dtypes, average, out.data_ptr(), copy ? copy->data_ptr() : nullptr,
                               out.numel(), c10::cuda::getCurrentCUDAStream()));
}

TORCH_LIBRARY_FRAGMENT(symm_overlap, m) {
  m.def("reduce_partials(Tensor[] partials, bool average, Tensor(a!) out, Tensor(b!)? copy=None) -> ()");
}
TORCH_LIBRARY_IMPL(symm_overlap, CUDA, m) {
  m.impl("reduce_partials", &reduce_partials);
}
TORCH_LIBRARY_IMPL(symm_overlap, Meta, m) {
  m.impl("reduce_partials", &reduce_partials_meta);
}

}  // namespace symm_overlap::cuda
