#include "cpu/counted.h"

#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/custom_function.h>

namespace symm_overlap::cpu {

namespace {

// Not a view of `local`, whose gradient torch would derive anew when the version of the base changes.
class Counting : public torch::autograd::Function<Counting> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& local,
                            const c10::VariableVersion& version) {
    context->set_materialize_grads(false);
    return at::Tensor(local.unsafeGetTensorImpl()->shallow_copy_and_detach(version, false));
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0], at::Tensor()};
  }
};

}  // namespace

at::Tensor counting_writes_to(const at::Tensor& local, const at::Tensor& whole) {
  return Counting::apply(local, whole.unsafeGetTensorImpl()->version_counter());
}

}  // namespace symm_overlap::cpu
