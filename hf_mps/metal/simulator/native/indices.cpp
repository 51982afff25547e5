// Indices out of range, which the CPU refuses at once.
//
// Metal's kernels before torch 2.14 read zeros there and write nowhere (pytorch#144824, #123119, #154235, #108148).
// Those of 2.14 remember an error that is raised when somebody next waits for the device (pull requests #166615,
// #187109, #187559), and names no place. And what a bag of embeddings returns beside its sums, which others index by.
#include "boxed.h"
#include "misread.h"

#include <ATen/native/EmbeddingBag.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/masked_fill.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <map>
#include <mutex>

namespace metal {

std::atomic<bool> silent_indices{false};
std::atomic<bool> late_indices{false};

namespace {

using at::Tensor;

std::mutex late_lock;
std::string late_error; // of the first index out of range since somebody waited

// Which of the indices lie outside 0 … size - 1; undefined where none does, or the CPU's error is wanted.
Tensor outside(const Tensor& index, int64_t size, const Tensor& allowed = {}) {
  if ((!silent_indices && !late_indices) || index.numel() == 0 || size == 0) {
    return {};
  }
  auto [low, high] = at::aminmax(index);
  if (low.item<int64_t>() >= 0 && high.item<int64_t>() < size) {
    return {};
  }
  auto wrong = index.lt(0).logical_or_(index.ge(size));
  if (allowed.defined()) {
    wrong.logical_and_(allowed.logical_not());
  }
  if (!wrong.any().item<bool>()) {
    return {};
  }
  if (late_indices) {
    const std::lock_guard<std::mutex> guard(late_lock);
    if (late_error.empty()) {
      late_error = c10::str(
          "index ", index.masked_select(wrong)[0].item<int64_t>(), " is out of bounds for dimension with size ", size);
    }
  }
  return wrong;
}

int64_t length(const Tensor& self, int64_t dim) {
  return self.dim() == 0 ? 1 : self.size(dim);
}

void index_select(const Operator& op, Stack* stack) {
  const auto self = argument(op, stack, 0).toTensor();
  const auto dim = argument(op, stack, 1).toInt();
  const auto index = argument(op, stack, 2).toTensor();
  const auto wrong = outside(index, length(self, dim));
  if (!wrong.defined()) {
    return call(op, stack);
  }
  argument(op, stack, 2) = index.masked_fill(wrong, 0);
  call(op, stack);
  const auto& result = stack->back().toTensor();
  if (result.dim() == 0) {
    result.zero_();
  } else {
    result.index_fill_(dim, wrong.view(-1).nonzero().view(-1), 0);
  }
}

void gather(const Operator& op, Stack* stack) {
  const auto self = argument(op, stack, 0).toTensor();
  const auto index = argument(op, stack, 2).toTensor();
  const auto wrong = outside(index, length(self, argument(op, stack, 1).toInt()));
  if (!wrong.defined()) {
    return call(op, stack);
  }
  argument(op, stack, 2) = index.masked_fill(wrong, 0);
  call(op, stack);
  stack->back().toTensor().masked_fill_(wrong, 0);
}

void index_add(const Operator& op, Stack* stack) {
  const auto self = argument(op, stack, 0).toTensor();
  const auto dim = argument(op, stack, 1).toInt();
  const auto index = argument(op, stack, 2).toTensor();
  const auto wrong = outside(index, length(self, dim));
  if (wrong.defined()) {
    const auto source = argument(op, stack, 3).toTensor();
    argument(op, stack, 2) = index.masked_fill(wrong, 0);
    argument(op, stack, 3) = source.dim() == 0 ? source.mul(0) : source.index_fill(dim, wrong.view(-1).nonzero().view(-1), 0);
  }
  index_add_into_gaps(op, stack, &index_add_in_any_order);
}

void scatter_add(const Operator& op, Stack* stack) {
  const auto self = argument(op, stack, 0).toTensor();
  const auto index = argument(op, stack, 2).toTensor();
  const auto wrong = outside(index, length(self, argument(op, stack, 1).toInt()));
  if (wrong.defined()) {
    auto source = argument(op, stack, 3).toTensor();
    for (int64_t dim = 0; dim < index.dim(); ++dim) {
      source = source.narrow(dim, 0, index.size(dim));
    }
    argument(op, stack, 2) = index.masked_fill(wrong, 0);
    argument(op, stack, 3) = source.masked_fill(wrong, 0);
  }
  scatter_add_in_any_order(op, stack);
}

int64_t classes(const Tensor& self) {
  return self.dim() == 1 ? self.size(0) : self.size(1);
}

// A target out of range adds nothing to the sum, and counts in the mean all the same; its weight is read as zero.
void nll_loss(const Operator& op, Stack* stack) {
  const auto target = argument(op, stack, 1).toTensor();
  const bool weighted = argument(op, stack, 2).isTensor() && argument(op, stack, 2).toTensor().defined();
  const auto reduction = argument(op, stack, 3).toInt();
  const auto ignored = argument(op, stack, 4).toInt();
  const auto wrong = outside(target, classes(argument(op, stack, 0).toTensor()), target.eq(ignored));
  if (!wrong.defined()) {
    return call(op, stack);
  }
  argument(op, stack, 1) = target.masked_fill(wrong, ignored);
  call(op, stack);
  const auto& loss = (*stack)[stack->size() - 2].toTensor();
  const auto& total = stack->back().toTensor();
  if (reduction == 0 || weighted) {
    return;
  }
  const auto counted = total.clone();
  total.add_(wrong.sum().item<int64_t>());
  if (reduction == 1) {
    loss.mul_(counted.div(total)).nan_to_num_(0.0);
  }
}

void nll_loss_backward(const Operator& op, Stack* stack) {
  const auto target = argument(op, stack, 2).toTensor();
  const auto ignored = argument(op, stack, 5).toInt();
  const auto wrong = outside(target, classes(argument(op, stack, 1).toTensor()), target.eq(ignored));
  if (wrong.defined()) {
    argument(op, stack, 2) = target.masked_fill(wrong, ignored);
  }
  call(op, stack);
}

void embedding_gradient(const Operator& op, Stack* stack) {
  check_embedding_gradient(
      argument(op, stack, 0).toTensor(), argument(op, stack, 1).toTensor(), argument(op, stack, 2).toInt());
  static const Inside in_any_order = order_inside_of("embedding_dense_backward");
  (in_any_order == nullptr ? &call : in_any_order)(op, stack);
}

// EmbeddingBag.mm: the bag of each index in every mode, a size for each offset, and places of maxima for maxima alone.
void embedding_bag(const Operator& op, Stack* stack) {
  const auto indices = argument(op, stack, 1).toTensor();
  const auto offsets = argument(op, stack, 2).toTensor();
  const bool of_maxima = argument(op, stack, 4).toInt() == static_cast<int64_t>(at::native::EmbeddingBagMode::MAX);
  call(op, stack);
  auto results = stack->end() - 4;
  const auto bag_size = results[2].toTensor();
  const auto bags = bag_size.numel();
  if (results[1].toTensor().numel() != indices.numel()) {
    const auto places = at::arange(indices.numel(), bag_size.options());
    const auto bag = at::bucketize(places, offsets, false, true).sub_(1).clamp_max_(bags - 1);
    results[1] = bag.to(bag_size.scalar_type());
  }
  results[2] = at::constant_pad_nd(bag_size, {0, offsets.numel() - bags});
  if (!of_maxima) {
    results[3] = at::empty({0}, bag_size.options());
  }
}

} // namespace

Inside inside_of(const std::string& name) {
  static const std::map<std::string, Inside> all{
      {"index_select", &index_select},
      {"gather", &gather},
      {"index_add", &index_add},
      {"index_add_", &index_add},
      {"scatter_add", &scatter_add},
      {"scatter_add_", &scatter_add},
      {"nll_loss_forward", &nll_loss},
      {"nll_loss2d_forward", &nll_loss},
      {"nll_loss_backward", &nll_loss_backward},
      {"nll_loss2d_backward", &nll_loss_backward},
      {"embedding_dense_backward", &embedding_gradient},
      {"_embedding_bag", &embedding_bag},
      {"_embedding_bag_forward_only", &embedding_bag},
  };
  const auto found = all.find(name);
  return found == all.end() ? misread_inside_of(name) : found->second;
}

void raise_late_error() {
  if (!late_indices) {
    return;
  }
  std::string message;
  {
    const std::lock_guard<std::mutex> guard(late_lock);
    message.swap(late_error);
  }
  if (message.empty()) {
    return;
  }
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 1, message);
}

} // namespace metal
