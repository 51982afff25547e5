// Operators that wait in the queue, as on a Mac, until somebody waits for them.
//
// What their results will look like is asked of PyTorch's Meta kernels, which compute shapes alone. An operator without
// one, or whose result changes an argument's shape, is computed at once, after all that is queued before it.
#include "queue.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace metal {
namespace {

using at::Tensor;
using c10::IValue;
using Each = std::function<Tensor(const Tensor&)>;

// The value with each tensor in it replaced.
IValue replaced(const IValue& value, const Each& each) {
  if (value.isTensor()) {
    return each(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor tensor : value.toTensorList()) {
      list.push_back(each(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor> tensor : value.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional(each(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

// A tensor without memory that looks as the device's does.
Tensor meta(const Tensor& tensor) {
  const c10::Device nowhere(c10::kMeta);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(), c10::DataPtr(nullptr, nowhere),
      c10::GetAllocator(c10::kMeta), /*resizable=*/true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::Meta), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return made;
}

bool looks_like(const Tensor& one, const Tensor& other) {
  return one.sizes() == other.sizes() && one.strides() == other.strides() &&
      one.storage_offset() == other.storage_offset();
}

// What a job holds of an argument: numbers of the host are read when work is handed over.
Tensor kept(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_mps()) {
    return another(tensor);
  }
  auto copy = tensor.clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

// Arguments of a call, the device's tensors beside what stands for them.
struct Shapes {
  std::vector<Tensor> device;
  std::vector<Tensor> metas;
  bool known = true;

  Tensor stand_in(const Tensor& tensor) {
    if (!tensor.defined() || (!tensor.is_mps() && tensor.dim() == 0 && tensor.is_cpu())) {
      return tensor;
    }
    if (!tensor.is_mps() || tensor.is_sparse() || tensor.is_conj() || tensor.is_neg() || tensor._is_zerotensor()) {
      known = false;
      return tensor;
    }
    device.push_back(tensor);
    metas.push_back(meta(tensor));
    return metas.back();
  }

  // The device's result for a meta one: an argument, or a new tensor; unknown where it is a view of an argument.
  Tensor result(const Tensor& found) {
    if (!found.defined()) {
      return found;
    }
    for (size_t i = 0; i < metas.size(); ++i) {
      if (metas[i].is_same(found)) {
        return device[i];
      }
      known = known && !metas[i].storage().is_alias_of(found.storage());
    }
    if (!known || !found.is_meta() || found.is_sparse()) {
      known = false;
      return {};
    }
    check_dtype(found.scalar_type());
    return Tensor(at::detail::empty_strided_generic(
        found.sizes(), found.strides(), allocator(), c10::DispatchKeySet(c10::DispatchKey::MPS), found.scalar_type()));
  }

  bool unchanged() const {
    for (size_t i = 0; i < metas.size(); ++i) {
      if (!looks_like(metas[i], device[i])) {
        return false;
      }
    }
    return true;
  }
};

// The results' shapes, on `stack` in the arguments' place; false where the operator has no Meta kernel or that refuses.
bool ask_for_shapes(const c10::OperatorHandle& op, Stack* stack) {
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
    return false;
  }
  c10::impl::ExcludeDispatchKeyGuard inside(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
  } catch (const std::exception&) {
    return false; // the operator itself says what is wrong
  }
  return true;
}

// The arguments as they go to a Meta kernel.
Stack without_memory(c10::ArrayRef<IValue> given, std::optional<size_t> generator, Shapes& shapes) {
  Stack asked;
  for (size_t i = 0; i < given.size(); ++i) {
    if (i == generator) {
      asked.emplace_back();
    } else if (given[i].isDevice()) {
      asked.emplace_back(c10::Device(c10::kMeta));
    } else {
      asked.push_back(replaced(given[i], [&](const Tensor& tensor) { return shapes.stand_in(tensor); }));
    }
  }
  return asked;
}

// The arguments as a job holds them; random numbers are drawn in the order of the calls.
Stack held(c10::ArrayRef<IValue> given, std::optional<size_t> generator) {
  Stack call;
  for (size_t i = 0; i < given.size(); ++i) {
    call.push_back(
        i == generator ? IValue(next_draw(given[i].toOptional<at::Generator>())) : replaced(given[i], &kept));
  }
  return call;
}

void fill_result(const Tensor& to, const Tensor& found) {
  if (to.defined() && found.defined() && to.data_ptr() != found.data_ptr()) {
    auto there = host_view(to);
    at::native::copy_(there, host_view(found), /*non_blocking=*/false);
  }
}

} // namespace

bool queue_call(
    const c10::OperatorHandle& op,
    Stack* stack,
    std::optional<size_t> generator,
    std::function<void(Stack*)> compute) {
  const size_t arguments = op.schema().arguments().size();
  const auto given = c10::ArrayRef<IValue>(*stack).slice(stack->size() - arguments);
  Shapes shapes;
  auto asked = without_memory(given, generator, shapes);
  if (!shapes.known || !ask_for_shapes(op, &asked) || !shapes.unchanged()) {
    return false;
  }
  Stack results, promised;
  for (const auto& found : asked) {
    if (!found.isTensor()) {
      return false;
    }
    results.emplace_back(shapes.result(found.toTensor()));
    promised.emplace_back(another(results.back().toTensor()));
  }
  if (!shapes.known) {
    return false;
  }
  queue_job([call = held(given, generator), promised = std::move(promised), compute = std::move(compute)]() mutable {
    compute(&call);
    for (size_t i = 0; i < promised.size(); ++i) {
      fill_result(promised[i].toTensor(), call[i].toTensor());
    }
  });
  stack->erase(stack->end() - static_cast<std::ptrdiff_t>(arguments), stack->end());
  stack->insert(stack->end(), results.begin(), results.end());
  return true;
}

} // namespace metal
