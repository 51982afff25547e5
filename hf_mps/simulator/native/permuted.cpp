// Tensors that are permuted, read by some kernels as if they lay in the order of their dimensions.
//
// pytorch#175188 (backward of activations) and #175189 (of batch norm, also for channels_last): MPSGraph is given the
// bytes as they lie and the shape as it is called.
#include "device.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <set>

namespace metal {

std::atomic<bool> permuted_activations{false};

namespace {

void misread(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t arguments = op.schema().arguments().size();
  for (size_t i = stack->size() - arguments; permuted_activations && i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor() && value.toTensor().defined() && !value.toTensor().is_contiguous() &&
        value.toTensor().is_non_overlapping_and_dense()) {
      const auto tensor = value.toTensor();
      value = tensor.as_strided(tensor.sizes(), c10::TensorType::contiguousStridesOf(tensor.sizes()));
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

} // namespace

Inside permuted_inside_of(const std::string& name) {
  static const std::set<std::string> names{
      "tanh_backward", "sigmoid_backward", "silu_backward", "softplus_backward", "mish_backward",
      "threshold_backward", "logit_backward", "native_batch_norm_backward"};
  return names.count(name) > 0 ? &misread : order_inside_of(name);
}

} // namespace metal
