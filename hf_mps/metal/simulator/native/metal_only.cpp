// Operators that only the Metal backend has a kernel for, done with the CPU's operators over the same memory.
#include "products.h"
#include "queue.h"

#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_attention_math_for_mps_ops.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool2d_with_indices_backward.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <type_traits>

namespace metal {
namespace {

using at::Tensor;
using c10::IntArrayRef;

// Inside a kernel: below autograd and autocast.
struct Below {
  Below(const char* name, c10::ArrayRef<c10::IValue> given) {
    launched(name, given);
  }
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
};

Tensor back(const Tensor& result) {
  return result.defined() ? adopt(result) : result;
}

std::vector<int64_t> zeros(IntArrayRef like) {
  return std::vector<int64_t>(like.size(), 0);
}

std::vector<int64_t> sizes_of_result(
    const Tensor& self, const Tensor& weight, IntArrayRef padding, IntArrayRef stride, IntArrayRef dilation) {
  std::vector<int64_t> sizes{self.size(0), weight.size(0)};
  for (size_t at = 0; at < stride.size() && static_cast<int64_t>(at) + 2 < self.dim(); ++at) {
    const auto reach = dilation[at] * (weight.size(at + 2) - 1) + 1;
    sizes.push_back((self.size(at + 2) + 2 * padding[at] - reach) / stride[at] + 1);
  }
  return sizes;
}

Tensor convolution(
    const Tensor& self,
    const Tensor& weight,
    const std::optional<Tensor>& bias,
    IntArrayRef padding,
    IntArrayRef stride,
    IntArrayRef dilation,
    int64_t groups) {
  Below below("aten::_mps_convolution", {self, weight, bias, padding, stride, dilation, groups});
  check_convolution(self, weight, sizes_of_result(self, weight, padding, stride, dilation));
  return back(at::convolution(
      misread_volume(host(self)), host(weight), host(bias), stride, padding, dilation, false, zeros(padding), groups));
}

// oneDNN writes past its workspace here and corrupts the heap (uxlfoundation/oneDNN 6035): the weight's gradient of a 1x1
// convolution with a stride, few channels, images with the channels last.
bool overruns(const Tensor& self, const Tensor& weight, IntArrayRef stride) {
  const bool points = weight.dim() == 4 && weight.size(2) == 1 && weight.size(3) == 1 && weight.size(1) < 16;
  const bool strided = std::any_of(stride.begin(), stride.end(), [](int64_t each) { return each > 1; });
  const auto last = at::MemoryFormat::ChannelsLast;
  return points && strided && (self.suggest_memory_format() == last || weight.suggest_memory_format() == last);
}

// The gradient of a weight alone, of tensors on the host.
Tensor weights_gradient(
    const Tensor& self,
    const Tensor& grad_output,
    const Tensor& weight,
    IntArrayRef padding,
    IntArrayRef stride,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups) {
  const bool plain = !transposed && overruns(self, weight, stride);
  const auto laid = [&](const Tensor& each) { return plain ? each.clone(at::MemoryFormat::Contiguous) : each; };
  return std::get<1>(at::convolution_backward(
      laid(grad_output), laid(self), laid(weight), at::OptionalIntArrayRef(), stride, padding, dilation, transposed,
      output_padding, groups, {false, true, false}));
}

// The same from as many rows of the batch as the device counts.
Tensor miscounted(
    const Tensor& self,
    const Tensor& grad_output,
    const Tensor& weight,
    IntArrayRef padding,
    IntArrayRef stride,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups) {
  const int64_t counted = *counted_batch(self);
  if (counted == 0) {
    return at::zeros_like(weight);
  }
  return weights_gradient(
      self.narrow(0, 0, counted), grad_output.narrow(0, 0, counted), weight, padding, stride, dilation, transposed,
      output_padding, groups);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& self,
    const Tensor& grad_output,
    const Tensor& weight,
    IntArrayRef padding,
    IntArrayRef stride,
    IntArrayRef dilation,
    int64_t groups,
    std::array<bool, 3> mask) {
  Below below("aten::mps_convolution_backward", {self, grad_output, weight, padding, stride, dilation, groups, mask});
  check_convolution(grad_output, weight, grad_output.sizes());
  const std::array<int64_t, 1> bias{weight.size(0)};
  const bool apart = mask[1] && overruns(self, weight, stride);
  auto [input, kernel, offset] = at::convolution_backward(
      host(grad_output), host(self), host(weight), IntArrayRef(bias), stride, padding, dilation, false,
      zeros(padding), groups, {mask[0], mask[1] && !apart, mask[2]});
  if (apart) {
    kernel = weights_gradient(
        host(self), host(grad_output), host(weight), padding, stride, dilation, false, zeros(padding), groups);
  }
  if (mask[1] && counted_batch(self)) {
    kernel = miscounted(
        host(self), host(grad_output), host(weight), padding, stride, dilation, false, zeros(padding), groups);
  }
  return {back(input), back(kernel), back(offset)};
}

Tensor convolution_transpose(
    const Tensor& self,
    const Tensor& weight,
    IntArrayRef padding,
    IntArrayRef output_padding,
    IntArrayRef stride,
    IntArrayRef dilation,
    int64_t groups) {
  Below below("aten::_mps_convolution_transpose", {self, weight, padding, output_padding, stride, dilation, groups});
  check_convolution_transpose(self);
  check_convolution(self, weight, self.sizes());
  return back(at::convolution(
      host(self), host(weight), {}, stride, padding, dilation, true, output_padding, groups));
}

std::tuple<Tensor, Tensor> convolution_transpose_backward(
    const Tensor& self,
    const Tensor& grad_output,
    const Tensor& weight,
    IntArrayRef padding,
    IntArrayRef output_padding,
    IntArrayRef stride,
    IntArrayRef dilation,
    int64_t groups,
    std::array<bool, 2> mask) {
  Below below("aten::mps_convolution_transpose_backward", {self, grad_output, weight, padding, output_padding, stride, dilation, groups, mask});
  check_convolution(grad_output, weight, self.sizes());
  auto [input, kernel, offset] = at::convolution_backward(
      host(grad_output), host(self), host(weight), at::OptionalIntArrayRef(), stride, padding, dilation, true,
      output_padding, groups, {mask[0], mask[1], false});
  if (mask[0] && conv3d_layout && grad_output.dim() == 5) { // a convolution of its own
    input = at::convolution(
        misread_volume(host(grad_output)), host(weight), {}, stride, padding, dilation, false, zeros(padding), groups);
  }
  if (mask[1] && counted_batch(self)) {
    kernel = miscounted(
        host(self), host(grad_output), host(weight), padding, stride, dilation, true, output_padding, groups);
  }
  return {back(input), back(kernel)};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// On the host.
Gradients linear_gradients(
    const Tensor& self, const Tensor& grad_output, const Tensor& weight, std::array<bool, 3> mask) {
  const bool vector = weight.dim() == 1; // whose result lost its last dimension
  const auto grad = vector ? host(grad_output).unsqueeze(-1) : host(grad_output);
  const auto matrix = vector ? host(weight).unsqueeze(0) : host(weight);
  const auto of_rows = grad.reshape({-1, grad.size(-1)});
  const auto rows = host(self).reshape({-1, self.size(-1)});
  Tensor input, kernel, bias;
  if (mask[0]) {
    input = grad.matmul(matrix);
  }
  if (mask[1]) {
    kernel = of_rows.t().matmul(rows);
  }
  if (mask[2]) {
    bias = of_rows.sum(0);
  }
  linear_backward_faults(rows, of_rows, input, kernel);
  misread_gradient(grad, input);
  return {input, vector && kernel.defined() ? kernel.squeeze(0) : kernel, bias};
}

void fill_promised(const Tensor& promised, const Tensor& found) {
  if (promised.defined()) {
    host(promised).copy_(found);
  }
}

Gradients linear_backward(
    const Tensor& self, const Tensor& grad_output, const Tensor& weight, std::array<bool, 3> mask) {
  Below below("aten::linear_backward", {self, grad_output, weight, mask});
  check_linear_backward(self, grad_output, weight);
  if (!queued_work) {
    const auto [input, kernel, bias] = linear_gradients(self, grad_output, weight, mask);
    return {back(input), back(kernel), back(bias)};
  }
  const auto made = [&](bool wanted, IntArrayRef shape) {
    return wanted ? at::empty(shape, weight.options()) : Tensor();
  };
  Gradients promised{made(mask[0], self.sizes()), made(mask[1], weight.sizes()), made(mask[2], {weight.dim() == 1 ? 1 : weight.size(0)})};
  const auto& [of_rows, of_weight, of_bias] = promised;
  const Gradients into{another(of_rows), another(of_weight), another(of_bias)};
  queue_job([rows = another(self), grad = another(grad_output), kernel = another(weight), mask, into] {
    c10::impl::ExcludeDispatchKeyGuard below(
        c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
    const auto found = linear_gradients(rows, grad, kernel, mask);
    fill_promised(std::get<0>(into), std::get<0>(found));
    fill_promised(std::get<1>(into), std::get<1>(found));
    fill_promised(std::get<2>(into), std::get<2>(found));
  });
  return promised;
}

Tensor max_pool2d_backward(
    const Tensor& grad_output,
    const Tensor& self,
    IntArrayRef kernel,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool ceil_mode) {
  Below below("aten::max_pool2d_backward", {grad_output, self, kernel, stride, padding, dilation, ceil_mode});
  const auto input = host(self);
  const auto indices =
      std::get<1>(at::max_pool2d_with_indices(input, kernel, stride, padding, dilation, ceil_mode));
  return back(at::max_pool2d_with_indices_backward(
      host(grad_output), input, kernel, stride, padding, dilation, ceil_mode, indices));
}

std::tuple<Tensor, Tensor> attention_with_weights(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& mask,
    double dropout,
    bool causal,
    const std::optional<Tensor>& dropout_mask,
    std::optional<double> scale,
    bool grouped) {
  Below below("aten::_scaled_dot_product_attention_math_for_mps", {query, key, value, mask, dropout, causal, dropout_mask, scale, grouped});
  auto [output, weights] = at::_scaled_dot_product_attention_math(
      host(query), host(key), host(value), host(mask), dropout, causal, host(dropout_mask), scale, grouped);
  return {back(output), back(weights)};
}

// Nothing in training calls these: 4-bit weights are for inference.
void not_simulated(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "The simulated Metal device does not compute '", op.operator_name(), "'; a real Metal device does.");
}

} // namespace

// All streams fill one queue, so a tensor's memory is free for others only after what any of them does with it.
void record_stream(Tensor&, c10::Stream) {}

void register_metal_only() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::MPS, __FILE__, __LINE__);
  library.impl("_mps_convolution", &convolution);
  library.impl("mps_convolution_backward", &convolution_backward);
  library.impl("_mps_convolution_transpose", &convolution_transpose);
  library.impl("mps_convolution_transpose_backward", &convolution_transpose_backward);
  library.impl("linear_backward", &linear_backward);
  library.impl("max_pool2d_backward", &max_pool2d_backward);
  if constexpr (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15) {
    library.impl("record_stream", &record_stream); // pytorch PR 193464
  }
  library.impl("_scaled_dot_product_attention_math_for_mps", &attention_with_weights);
  for (const char* name : {"_convert_weight_to_int4pack", "_weight_int4pack_mm"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&not_simulated>());
  }
}

} // namespace metal
