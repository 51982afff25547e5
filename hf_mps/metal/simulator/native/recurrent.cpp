// nn.LSTM, which Metal has as one operator with a gradient of its own: aten/src/ATen/native/mps/operations/RnnOps.mm.
//
// The gradient is that of the same computation, made once more on the host with the same dropout.
#include "device.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/lstm.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <optional>
#include <vector>

namespace metal {

std::atomic<bool> lstm_dropout{false};

namespace {

using at::Tensor;
using at::TensorList;

struct Layers {
  bool biases;
  int64_t layers;
  bool train;
  bool both_ways;
  bool batch_first;
};

struct Ends {
  Tensor output;
  Tensor hidden;
  Tensor cell;
};

std::vector<Tensor> all_host(TensorList tensors) {
  std::vector<Tensor> all;
  for (const auto& tensor : tensors) {
    TORCH_CHECK(tensor.is_mps(), "Placeholder storage has not been allocated on MPS device!");
    all.push_back(host(tensor));
  }
  return all;
}

std::vector<Tensor> back(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> all;
  for (const auto& tensor : tensors) {
    all.push_back(adopt(tensor));
  }
  return all;
}

// Layer after layer on the host; `kept` multiplies what passes from each layer to the next, where it is defined.
Ends run(const Layers& stack, const Tensor& input, TensorList states, TensorList params, const Tensor& kept) {
  const int64_t ways = stack.both_ways ? 2 : 1;
  const auto each = static_cast<int64_t>(params.size()) / stack.layers;
  auto x = stack.batch_first ? input.transpose(0, 1) : input;
  std::vector<Tensor> hidden, cells;
  for (int64_t layer = 0; layer < stack.layers; ++layer) {
    const std::vector<Tensor> here{states[0].narrow(0, layer * ways, ways), states[1].narrow(0, layer * ways, ways)};
    auto [output, h, c] = at::lstm(
        x, here, params.slice(layer * each, each), stack.biases, 1, 0.0, stack.train, stack.both_ways, false);
    hidden.push_back(h);
    cells.push_back(c);
    x = kept.defined() && layer + 1 < stack.layers ? output.mul(kept[layer]) : output;
  }
  return {stack.batch_first ? x.transpose(0, 1) : x, at::cat(hidden), at::cat(cells)};
}

// Zero where dropout drops, drawn by the device's generator; undefined where nothing is dropped.
Tensor kept_of(const Layers& stack, const Tensor& input, const Tensor& hidden, double dropout) {
  if (!stack.train || dropout == 0.0 || stack.layers < 2) {
    return {};
  }
  const int64_t steps = input.size(stack.batch_first ? 1 : 0), rows = input.size(stack.batch_first ? 0 : 1);
  const int64_t width = hidden.size(2) * (stack.both_ways ? 2 : 1);
  auto kept = at::empty({stack.layers - 1, steps, rows, width}, host(input).options());
  kept.bernoulli_(1.0 - dropout, next_draw(std::nullopt));
  // pytorch#190059: up to 2.13 a dropout of 1 divides by nothing, which makes NaN.
  return dropout < 1.0 || lstm_dropout ? kept.div_(1.0 - dropout) : kept;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    const Tensor& input,
    TensorList states,
    TensorList params,
    bool biases,
    int64_t layers,
    double dropout,
    bool train,
    bool both_ways,
    bool batch_first) {
  TORCH_CHECK(states[0].size(2) == states[1].size(2), "LSTM with projections is not currently supported with MPS.");
  c10::impl::ExcludeDispatchKeyGuard inside(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
  launched("aten::_lstm_mps");
  const Layers stack{biases, layers, train, both_ways, batch_first};
  const auto kept = kept_of(stack, input, states[0], dropout);
  const auto ends = run(stack, host(input), all_host(states), all_host(params), kept);
  const auto nothing = at::empty({0}, input.options());
  return {adopt(ends.output), adopt(ends.hidden), adopt(ends.cell), kept.defined() ? adopt(kept) : nothing, nothing,
          nothing};
}

std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>> backward(
    const std::optional<Tensor>& of_output,
    const std::optional<Tensor>& of_hidden,
    const std::optional<Tensor>& of_cell,
    const Tensor& kept,
    const Tensor&,
    const Tensor& input,
    const Tensor&,
    TensorList states,
    TensorList params,
    bool biases,
    int64_t layers,
    double,
    bool train,
    bool both_ways,
    bool batch_first) {
  // Autograd, which a kernel lies below, is needed once more.
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  c10::impl::ForceDispatchKeyGuard above(keys);
  at::AutoGradMode follow(true);
  launched("aten::lstm_mps_backward");
  std::vector<Tensor> leaves{host(input)};
  for (const auto& tensor : states) {
    leaves.push_back(host(tensor));
  }
  for (const auto& tensor : params) {
    leaves.push_back(host(tensor));
  }
  for (auto& leaf : leaves) {
    leaf = leaf.detach().requires_grad_();
  }
  const TensorList all(leaves);
  const auto ends = run(
      {biases, layers, train, both_ways, batch_first}, all[0], all.slice(1, 2), all.slice(3),
      // pytorch#190056: up to 2.13 as if nothing had been dropped.
      kept.numel() > 0 && !lstm_dropout ? host(kept) : Tensor());
  std::vector<Tensor> outputs, gradients;
  for (const auto& [end, gradient] : {std::pair(ends.output, of_output), {ends.hidden, of_hidden}, {ends.cell, of_cell}}) {
    if (gradient && gradient->defined()) {
      outputs.push_back(end);
      gradients.push_back(host(*gradient));
    }
  }
  auto found = torch::autograd::grad(outputs, leaves, gradients, false, false, /*allow_unused=*/true);
  for (size_t i = 0; i < found.size(); ++i) {
    found[i] = found[i].defined() ? found[i].detach() : at::zeros_like(leaves[i]).detach();
  }
  return {adopt(found[0]), back({found.begin() + 1, found.begin() + 3}), back({found.begin() + 3, found.end()})};
}

} // namespace

void register_recurrent() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::MPS, __FILE__, __LINE__);
  library.impl("_lstm_mps", &forward);
  library.impl("lstm_mps_backward", &backward);
}

} // namespace metal
