// Composite operators that branch by device inside, and that a wheel built without Metal sends the wrong way.
//
// On a Mac these have no kernel under the MPS key either; the branch is in their code, behind `#ifdef USE_MPS`. So ours
// take the composite kernels' place, do what a Mac does for device tensors, and leave every other device as it was.
#include "calls.h"
#include "queue.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_lstm_mps.h>
#include <ATen/ops/_mps_convolution.h>
#include <ATen/ops/_mps_convolution_transpose.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_attention_math_for_mps.h>
#include <ATen/ops/_validate_sparse_coo_tensor_args_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/mps_convolution_backward.h>
#include <ATen/ops/mps_convolution_transpose_backward.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <limits>

namespace metal {
namespace {

using at::Tensor;
using c10::IntArrayRef;

// Copy.mm: a copy into a tensor that lies otherwise than its source goes through memory of its own on the device. A
// source with holes, or one that is repeated, is made whole on the host first.
bool straight(const Tensor& to, const Tensor& from) {
  const bool whole = from.sizes() == to.sizes() && from.is_non_overlapping_and_dense();
  return whole ? from.strides() == to.strides() : to.is_contiguous();
}

// A copy between the host and the device waits until it is done, and all work before it, unless it is asked not to.
// Returns whether that was all: it is in the queue, or a fault has made it.
bool queue_copy(const Tensor& to, const Tensor& from, bool non_blocking) {
  if (from.device().is_mps()) {
    copied_out(to.nbytes());
    if (!non_blocking) {
      wait("copy to the host");
    }
    if (to.scalar_type() != from.scalar_type()) {
      settle(from.storage());
      if (faulty_copy(to, from)) {
        return true;
      }
    }
    if (!non_blocking || !late_copies) {
      return false;
    }
    copy_out_later(to, from);
    return true;
  }
  copied_in(to.nbytes());
  if (!straight(to, from)) {
    non_blocking = false;
  }
  if (!non_blocking) {
    wait("copy to the device");
  } else if (late_copies) {
    copy_in_later(to, from);
    return true;
  }
  return false;
}

// Both sides lie in host memory, so the CPU copies and converts between them.
Tensor& copy(Tensor& self, const Tensor& from, bool non_blocking) {
  if (!self.device().is_mps() && !from.device().is_mps()) {
    return at::native::copy_(self, from, non_blocking);
  }
  if (from.numel() != 0) {
    if (self.device() == from.device()) {
      launched("aten::copy_", {self, from});
      if (queued_work && !self.is_sparse() && !from.is_sparse()) {
        queue_job([to = another(self), source = another(from)] {
          auto there = host_view(to);
          at::native::copy_(there, host_view(source), /*non_blocking=*/false);
        });
        return self;
      }
    } else {
      record("aten::copy_", {self, from});
      if (queue_copy(self, from, non_blocking)) {
        return self;
      }
    }
  }
  const auto on_host = [](const Tensor& side) { return side.device().is_mps() ? host_view(side) : side; };
  auto to = on_host(self);
  at::native::copy_(to, on_host(from), non_blocking);
  return self;
}

// Metal has no fused attention for training: the math form, and a kernel of its own where no gradient is asked for.
Tensor attention(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& given,
    double dropout,
    bool causal,
    std::optional<double> scale,
    bool grouped) {
  if (!query.device().is_mps() || query.is_nested()) {
    return at::native::scaled_dot_product_attention(
        query, key, value, given, dropout, causal, scale, grouped);
  }
  TORCH_CHECK(
      query.dtype() == key.dtype() && query.dtype() == value.dtype(),
      "Expected query, key, and value to have the same dtype, but got query.dtype: ", query.dtype(),
      " key.dtype: ", key.dtype(), " and value.dtype: ", value.dtype(), " instead.");
  TORCH_CHECK(
      query.device() == key.device() && query.device() == value.device(),
      "Expected query, key, and value to have the same device type, but got query.device: ", query.device(),
      " key.device: ", key.device(), " and value.device: ", value.device(), " instead.");
  std::optional<Tensor> mask = given;
  if (mask && mask->defined() && mask->scalar_type() == c10::kBool) {
    mask = at::zeros_like(*mask, query.scalar_type())
               .masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
  }
  const bool training =
      c10::GradMode::is_enabled() && (query.requires_grad() || key.requires_grad() || value.requires_grad());
  if (training || dropout != 0.0) {
    return std::get<0>(at::_scaled_dot_product_attention_math(
        query, key, value, mask, dropout, causal, std::nullopt, scale, grouped));
  }
  const auto repeated = [&](const Tensor& heads) {
    const bool fewer = grouped && heads.dim() >= 3 && query.sym_size(-3) != heads.sym_size(-3);
    return fewer ? heads.repeat_interleave_symint(query.sym_size(-3) / heads.sym_size(-3), -3) : heads;
  };
  return std::get<0>(at::_scaled_dot_product_attention_math_for_mps(
      query, repeated(key), repeated(value), mask, dropout, causal, std::nullopt, scale));
}

std::tuple<Tensor, Tensor, Tensor> lstm(
    const Tensor& input,
    at::TensorList states,
    at::TensorList params,
    bool biases,
    int64_t layers,
    double dropout,
    bool train,
    bool both_ways,
    bool batch_first) {
  TORCH_CHECK(states.size() == 2, "lstm expects two hidden states");
  if (!input.device().is_mps()) {
    return at::native::lstm(input, states, params, biases, layers, dropout, train, both_ways, batch_first);
  }
  auto ends = at::_lstm_mps(input, states, params, biases, layers, dropout, train, both_ways, batch_first);
  return {std::get<0>(ends), std::get<1>(ends), std::get<2>(ends)};
}

// On a Mac `convolution` picks Metal's operators. A wheel without Metal ends in this operator, whose only kernel raises;
// ours goes on to the operators that a Mac calls.
Tensor convolution_overrideable(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& bias,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups) {
  TORCH_CHECK(
      input.device().is_mps() && weight.device().is_mps(),
      "Input type (", input.toString(), ") and weight type (", weight.toString(), ") should be the same");
  if (!transposed) {
    return at::_mps_convolution(input, weight, bias, padding, stride, dilation, groups);
  }
  auto output = at::_mps_convolution_transpose(input, weight, padding, output_padding, stride, dilation, groups);
  if (bias && bias->defined()) {
    std::vector<int64_t> shape(input.dim(), 1);
    shape[1] = -1;
    output.add_(bias->reshape(shape));
  }
  return output;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward_overrideable(
    const Tensor& grad_output,
    const Tensor& input,
    const Tensor& weight,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> mask) {
  if (!transposed) {
    return at::mps_convolution_backward(
        input, grad_output, weight, padding, stride, dilation, groups, mask);
  }
  auto [grad_input, grad_weight] = at::mps_convolution_transpose_backward(
      input, grad_output, weight, padding, output_padding, stride, dilation, groups, {mask[0], mask[1]});
  Tensor grad_bias;
  if (mask[2]) {
    std::vector<int64_t> dims{0};
    for (int64_t dim = 2; dim < grad_output.dim(); ++dim) {
      dims.push_back(dim);
    }
    grad_bias = grad_output.sum(dims);
  }
  return {grad_input, grad_weight, grad_bias};
}

// SparseTensor.cpp: whether a sparse tensor's places are in order is asked of a kernel that the device chooses, which a
// wheel without Metal has not. torch.load asks since 2.15.
void validate_sparse(
    const Tensor& indices,
    const Tensor& values,
    IntArrayRef sizes,
    std::optional<bool> coalesced,
    std::optional<bool> pinning) {
  if (!indices.device().is_mps() || !values.device().is_mps()) {
    return at::native::_validate_sparse_coo_tensor_args(indices, values, sizes, coalesced, pinning);
  }
  wait("validation of a sparse tensor");
  settle(indices.storage());
  settle(values.storage());
  at::native::_validate_sparse_coo_tensor_args(host_view(indices), host_view(values), sizes, coalesced, pinning);
}

} // namespace

void register_composites() {
  static torch::Library explicit_autograd(
      torch::Library::IMPL, "aten", c10::DispatchKey::CompositeExplicitAutograd, __FILE__, __LINE__);
  explicit_autograd.impl("copy_", &copy);
  explicit_autograd.impl("convolution_overrideable", &convolution_overrideable);
  explicit_autograd.impl("convolution_backward_overrideable", &convolution_backward_overrideable);
  static torch::Library implicit_autograd(
      torch::Library::IMPL, "aten", c10::DispatchKey::CompositeImplicitAutograd, __FILE__, __LINE__);
  implicit_autograd.impl("scaled_dot_product_attention", &attention);
  implicit_autograd.impl("lstm.input", &lstm);
  implicit_autograd.impl("_validate_sparse_coo_tensor_args", &validate_sparse);
}

} // namespace metal
