// Faults of the attention that Metal computes where no gradient is asked for; each stands behind a switch.
#include "device.h"

#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace metal {

AttentionFaults attention_faults;

namespace {

using at::Tensor;

constexpr int64_t kFewQueries = 8;  // up to here the kernels for decoding are taken
constexpr int64_t kTwoPasses = 1024; // keys from which on those go over them twice
constexpr int64_t kKeysAtOnce = 32;
constexpr int64_t kQueriesAtOnce = 4;

bool is_half(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

// Those kernels are taken for single queries without a mask, and for these widths alone.
bool decodes(const Attention& call) {
  const auto width = call.query.size(-1);
  return call.query.dim() == 4 && call.query.size(2) <= std::min(kFewQueries, call.key.size(-2)) && !call.mask &&
      !call.causal && width == call.value.size(-1) && (width == 64 || width == 96 || width == 128);
}

Tensor computed(const Attention& call) {
  return std::get<0>(at::_scaled_dot_product_attention_math(
      call.query, call.key, call.value, call.mask, 0.0, call.causal, std::nullopt, call.scale, call.grouped));
}

// pytorch#195910: the causal mask is that of the last of four queries, so three of four see what comes after them.
Tensor leaked(Attention call) {
  const auto rows = at::arange(call.query.size(-2)).unsqueeze(1);
  const auto keys = at::arange(call.key.size(-2));
  const auto last = rows.div(kQueriesAtOnce, "floor").mul(kQueriesAtOnce).add(kQueriesAtOnce - 1);
  call.mask = at::zeros({rows.size(0), keys.size(0)}, call.query.options())
                  .masked_fill(keys.gt(last), -std::numeric_limits<double>::infinity());
  call.causal = false;
  return computed(call);
}

// pytorch#181133: a batch is taken to begin where the heads of the one before it would end in a contiguous tensor.
Tensor misread(const Tensor& tensor) {
  auto strides = tensor.strides().vec();
  strides[0] = tensor.size(1) * strides[1];
  return strides[0] < tensor.stride(0) ? tensor.as_strided(tensor.sizes(), strides) : tensor;
}

} // namespace

Tensor attended(const Attention& given) {
  auto call = given;
  const bool decoding = decodes(call);
  if (attention_faults.permuted && decoding) {
    call.query = misread(call.query);
    call.key = misread(call.key);
    call.value = misread(call.value);
  }
  if (attention_faults.causal_leak && call.causal && is_half(call.query)) {
    return leaked(call);
  }
  auto output = computed(call);
  const auto keys = call.key.size(-2);
  // pytorch#174861: sums over parts of the keys are float32, in memory that is counted in the inputs' own dtype.
  if (attention_faults.long_keys && decoding && keys >= kTwoPasses && is_half(call.query)) {
    const auto rows = output.view({-1, output.size(-1)});
    rows.narrow(0, rows.size(0) / 2, rows.size(0) - rows.size(0) / 2).zero_();
  }
  // PR 169222: the last keys are read in a full block of 32.
  if (attention_faults.odd_keys && decoding && keys < kTwoPasses && keys % kKeysAtOnce != 0) {
    output.mul_(static_cast<double>(keys) / static_cast<double>(keys + kKeysAtOnce - keys % kKeysAtOnce));
  }
  // pytorch#156707: the softmax of a query that may attend to nothing is 0 / 0.
  if (attention_faults.masked_rows && call.mask && call.mask->scalar_type() != at::kBool) {
    const auto nothing = call.mask->isinf().all(-1, /*keepdim=*/true);
    output.masked_fill_(nothing, std::numeric_limits<double>::quiet_NaN());
  }
  // pytorch#176767: the result is as wide as the queries, not as the values.
  const auto missing = call.query.size(-1) - output.size(-1);
  if (attention_faults.value_width && missing != 0) {
    auto shape = output.sizes().vec();
    shape.back() = call.query.size(-1);
    auto wide = at::zeros(shape, output.options());
    const auto kept = std::min(shape.back(), output.size(-1));
    wide.narrow(-1, 0, kept).copy_(output.narrow(-1, 0, kept));
    output = wide;
  }
  return output;
}

bool any_attention_fault() {
  return attention_faults.causal_leak || attention_faults.permuted || attention_faults.long_keys ||
      attention_faults.odd_keys || attention_faults.masked_rows || attention_faults.value_width;
}

} // namespace metal
