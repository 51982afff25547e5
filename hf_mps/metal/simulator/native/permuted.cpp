// Tensors that some kernels read as what they are not.
//
// pytorch#175188 (backward of activations) and #175189 (of batch norm, also for channels_last): MPSGraph is given the
// bytes of a permuted tensor as they lie and the shape as it is called. #131736: before macOS 15 what softplus, threshold
// and prelu compute lands in a temporary that nobody copies back where their result is permuted. #190054: a layer norm's
// kernel is chosen by the input's dtype, and reads weight and bias as if they had it.
#include "dtypes.h"
#include "products.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros.h>
#include <torch/version.h>

#include <algorithm>
#include <set>

namespace metal {

std::atomic<bool> permuted_activations{false};
std::atomic<bool> mixed_layer_norm{false};
std::atomic<bool> permuted_batch_norm{false};
std::atomic<bool> permuted_results{false};

namespace {

// Since 2.14 sigmoid, silu and mish have kernels of PyTorch's own, which read strides.
constexpr bool kGraphs = TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 14;

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

// prelu's result is in channels_last or contiguous, whatever the order of its input.
void unwritten(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto name = op.schema().name().substr(sizeof("aten::") - 1);
  const bool prelu = name.find("prelu") != std::string::npos;
  if (const auto by_dtype = dtype_inside_of(name)) {
    by_dtype(op, stack);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  for (size_t i = stack->size() - op.schema().returns().size(); permuted_results && i < stack->size(); ++i) {
    const auto result = (*stack)[i].toTensor();
    if (!result.is_contiguous() && (!prelu || result.suggest_memory_format() != at::MemoryFormat::Contiguous)) {
      result.zero_();
    }
  }
}

// The bytes of `given` as values of another dtype, as many as before; zeros where they end.
at::Tensor reread(const at::Tensor& given, c10::ScalarType dtype) {
  const auto bytes = given.contiguous().view(-1).view(at::kByte);
  auto longer = at::zeros({given.numel() * static_cast<int64_t>(c10::elementSize(dtype))}, bytes.options());
  const auto length = std::min(longer.numel(), bytes.numel());
  longer.narrow(0, 0, length).copy_(bytes.narrow(0, 0, length));
  return longer.view(dtype).view(given.sizes());
}

// #175189: on macOS 26 that one reads by a view, which there is none of.
void batch_norm_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto input = (*stack)[stack->size() - op.schema().arguments().size() + 1].toTensor();
  TORCH_CHECK(
      !permuted_batch_norm || input.is_contiguous(),
      "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
      "contiguous subspaces). Use .reshape(...) instead.");
  misread(op, stack);
}

void layer_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const auto dtype = (*stack)[first].toTensor().scalar_type();
  for (const size_t at : {first + 2, first + 3}) { // weight and bias
    auto& value = (*stack)[at];
    if (mixed_layer_norm && value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() != dtype) {
      value = reread(value.toTensor(), dtype);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

} // namespace

Inside unwritten_inside_of(const std::string& name) {
  static const std::set<std::string> names{"softplus", "threshold", "_prelu_kernel", "_prelu_kernel_backward"};
  return names.count(name) > 0 ? &unwritten : nullptr;
}

Inside permuted_inside_of(const std::string& name) {
  static const std::set<std::string> names{"tanh_backward", "softplus_backward", "threshold_backward", "logit_backward"};
  static const std::set<std::string> until_2_13{"sigmoid_backward", "silu_backward", "mish_backward"};
  if (name == "native_batch_norm_backward") {
    return &batch_norm_backward;
  }
  if (name == "native_layer_norm") {
    return &layer_norm;
  }
  return names.count(name) > 0 || (kGraphs && until_2_13.count(name) > 0) ? &misread : order_inside_of(name);
}

} // namespace metal
