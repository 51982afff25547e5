// Sums to which many threads of the device add at once: their order, and with it their last bits, differs from call to
// call and from run to run. And which of several values written to one place stays there.
//
// Which operators, and since when, is read from the names of the Metal kernels in the macOS wheels of torch 2.13
// and 2.14, and from their sources, which call c10::metal::AtomicType<T>::atomic_add. pytorch#195404 reports
// it of embedding's backward, #161029 of indexing.
#include "boxed.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <torch/version.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <random>

namespace metal {

std::atomic<bool> atomic_order{false};

namespace {

using at::Tensor;

// Nobody's seed governs the order in which a Mac's cores come by: two processes differ too.
template <typename F>
void with_chance(F use) {
  static std::mutex lock;
  static auto* chance = new std::mt19937_64(std::random_device{}());
  const std::lock_guard<std::mutex> guard(lock);
  use(*chance);
}

Tensor any_order(int64_t count) {
  auto order = at::empty({count}, at::kLong);
  auto* first = order.mutable_data_ptr<int64_t>();
  std::iota(first, first + count, 0);
  with_chance([&](auto& chance) { std::shuffle(first, first + count, chance); });
  return order;
}

Tensor about_half(const Tensor& of) {
  auto chosen = at::empty(of.sizes(), at::kBool);
  auto* first = chosen.mutable_data_ptr<bool>();
  with_chance([&](auto& chance) {
    uint64_t bits = 0;
    for (int64_t i = 0, count = chosen.numel(); i < count; ++i, bits >>= 1) {
      bits = i % 64 == 0 ? chance() : bits;
      first[i] = (bits & 1) != 0;
    }
  });
  return chosen;
}

bool rounds(const Tensor& terms) {
  return terms.defined() && terms.numel() > 1 &&
      (at::isFloatingType(terms.scalar_type()) || at::isComplexType(terms.scalar_type()));
}

void embedding_backward(const Operator& op, Stack* stack) {
  const auto grad = argument(op, stack, 0).toTensor();
  const auto indices = argument(op, stack, 1).toTensor();
  if (atomic_order && rounds(grad)) {
    const auto order = any_order(indices.numel());
    argument(op, stack, 0) = grad.reshape({-1, grad.size(-1)}).index_select(0, order);
    argument(op, stack, 1) = indices.reshape(-1).index_select(0, order);
  }
  call(op, stack);
}

// Adds a half of the terms, drawn anew each time, and then the other.
void add_in_halves(const Operator& op, Stack* stack, size_t terms) {
  const auto count = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  std::vector<c10::IValue> rest(stack->end() - count, stack->end());
  const auto all = rest[terms].toTensor();
  if (!atomic_order || !rounds(all)) {
    return call(op, stack);
  }
  const auto later = about_half(all);
  argument(op, stack, terms) = all.masked_fill(later, 0);
  call(op, stack);
  rest[0] = stack->back();
  rest[terms] = all.masked_fill(later.logical_not(), 0);
  if (op.schema().name() == "aten::scatter_reduce" || op.schema().name() == "aten::scatter_reduce_") {
    rest[5] = true; // include_self
  }
  stack->pop_back();
  stack->insert(stack->end(), rest.begin(), rest.end());
  call(op, stack);
}

// The gradient of what came in is the sum of those for two halves of the gradient of what went out.
void backward_in_halves(const Operator& op, Stack* stack) {
  const auto grad = argument(op, stack, 0).toTensor();
  if (!atomic_order || op.schema().is_mutable() || !rounds(grad)) {
    return call(op, stack);
  }
  const auto count = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  Stack other(stack->end() - count, stack->end());
  const auto later = about_half(grad);
  other[0] = grad.masked_fill(later, 0);
  argument(op, stack, 0) = grad.masked_fill(later.logical_not(), 0);
  call(op, stack);
  call(op, &other);
  for (size_t i = 1; i <= other.size(); ++i) {
    const auto& sum = (*stack)[stack->size() - i].toTensor();
    if (sum.defined()) {
      sum.add_(other[other.size() - i].toTensor());
    }
  }
}

// What torch refuses under torch.use_deterministic_algorithms(True) (pull request #185061).
void alert(const Tensor& self, const char* kernel) {
  if (at::isFloatingType(self.scalar_type()) || at::isComplexType(self.scalar_type())) {
    at::globalContext().alertNotDeterministic(kernel);
  }
}

// Threads that write to one place come in any order too: which value stays there is left to chance.
void write_in_any_order(const Operator& op, Stack* stack) {
  const auto indices = argument(op, stack, 1).toOptionalTensorVector();
  const auto values = argument(op, stack, 2).toTensor();
  if (indices.size() == 1 && indices[0] && indices[0]->dim() == 1 && at::isIntegralType(indices[0]->scalar_type(), false) &&
      indices[0]->scalar_type() != at::kByte) {
    const auto order = any_order(indices[0]->numel());
    if (values.dim() == argument(op, stack, 0).toTensor().dim() && values.size(0) == order.numel()) {
      argument(op, stack, 1) = c10::List<std::optional<Tensor>>({indices[0]->index_select(0, order)});
      argument(op, stack, 2) = values.index_select(0, order);
    }
  }
  call(op, stack);
}

void index_put(const Operator& op, Stack* stack) {
  if (!argument(op, stack, 3).toBool()) {
    return atomic_order && !at::globalContext().deterministicAlgorithms() ? write_in_any_order(op, stack)
                                                                          : call(op, stack);
  }
  alert(argument(op, stack, 0).toTensor(), "index_put_with_accumulate_mps");
  add_in_halves(op, stack, 2);
}

void scatter_reduce(const Operator& op, Stack* stack) {
  const auto how = argument(op, stack, 4).toStringView();
  if (how == "sum" || how == "mean" || how == "prod") {
    alert(argument(op, stack, 0).toTensor(), "scatter_reduce_mps");
  }
  how == "sum" ? add_in_halves(op, stack, 3) : call(op, stack);
}

const std::map<std::string, Inside>& atomics() {
  static const auto* all = new std::map<std::string, Inside>{
      {"_index_put_impl_", &index_put},
      {"upsample_bicubic2d_backward", &backward_in_halves},
      {"upsample_nearest3d_backward", &backward_in_halves},
      {"_upsample_nearest_exact3d_backward", &backward_in_halves},
      {"upsample_trilinear3d_backward", &backward_in_halves},
      {"max_pool3d_with_indices_backward", &backward_in_halves},
      {"avg_pool3d_backward", &backward_in_halves},
      {"_embedding_bag_dense_backward", &backward_in_halves},
      {"embedding_dense_backward", &embedding_backward},
      {"scatter_reduce", &scatter_reduce},
      {"scatter_reduce_", &scatter_reduce},
      {"grid_sampler_2d_backward", &backward_in_halves},
      {"grid_sampler_3d_backward", &backward_in_halves},
  };
  return *all;
}

} // namespace

Inside order_inside_of(const std::string& name) {
  const auto found = atomics().find(name);
  return found != atomics().end() ? found->second : nullptr;
}

void index_add_in_any_order(const Operator& op, Stack* stack) {
  // Under the flag Metal hands it to index_put_, and so it is refused with that one's name.
  alert(argument(op, stack, 0).toTensor(), "index_put_with_accumulate_mps");
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  add_in_halves(op, stack, 3);
#else
  call(op, stack);
#endif
}

void scatter_add_in_any_order(const Operator& op, Stack* stack) {
  alert(argument(op, stack, 0).toTensor(), "scatter_reduce_mps");
  add_in_halves(op, stack, 3);
}

} // namespace metal
