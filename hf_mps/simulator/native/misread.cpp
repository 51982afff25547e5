// Kernels that are right about their tensors' sizes and wrong about what lies in them: a number, a volume.
#include "dtypes.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <cstring>

namespace metal {

std::atomic<bool> half_unscale{false};
std::atomic<bool> conv3d_layout{false};

namespace {

// pytorch PR 184286: the factor is bound as float32 and declared in the gradients' dtype, so that half of its bytes are
// read, which are zero for every power of two.
void unscale(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto grads = (*stack)[stack->size() - 3].toTensorVector();
  if (!half_unscale || grads.empty() || grads[0].itemsize() != 2) {
    return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  const auto found = (*stack)[stack->size() - 2].toTensor();
  const auto given = (*stack)[stack->size() - 1].toTensor();
  const auto factor = at::empty({}, grads[0].options());
  std::memcpy(factor.mutable_data_ptr(), given.const_data_ptr(), factor.itemsize());
  for (const auto& grad : grads) {
    if (!grad.isfinite().all().item<bool>()) {
      found.fill_(1);
    }
    grad.mul_(factor);
  }
  torch::jit::drop(*stack, 3);
}

} // namespace

// pytorch#197114: as if its channels lay last, which is right where they do.
at::Tensor misread_volume(const at::Tensor& input) {
  if (!conv3d_layout || input.dim() != 5 || !input.is_contiguous()) {
    return input;
  }
  const auto shape = input.sizes();
  return input.view({shape[0], shape[2], shape[3], shape[4], shape[1]}).permute({0, 4, 1, 2, 3});
}

Inside misread_inside_of(const std::string& name) {
  if (name == "_amp_foreach_non_finite_check_and_unscale_") {
    return &unscale;
  }
  const auto found = dtype_inside_of(name);
  return found == nullptr ? permuted_inside_of(name) : found;
}

} // namespace metal
