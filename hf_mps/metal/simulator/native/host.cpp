// Any operator on the host, over the device's own memory.
//
// One boxed kernel serves every operator that Metal has and that needs nothing special: it makes CPU tensors over the
// same bytes, calls the CPU's kernel, and hands the results back as device tensors over the memory they came in.
// What an operator needs of this is read from its schema once, when it is registered.
#include "calls.h"
#include "loan.h"
#include "misread.h"
#include "queue.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace metal {
namespace {

// What the schema says, read once.
struct Plan {
  explicit Plan(const c10::FunctionSchema& schema) : name(schema.operator_name()), whole_name(c10::toString(name)) {
    for (const auto& argument : schema.arguments()) {
      if (argument.real_type()->str().find("Generator") != std::string::npos) {
        generator = written.size();
      }
      if (*argument.type() == *c10::getTypePtr<c10::List<std::optional<at::Tensor>>>()) {
        optional_lists.push_back(written.size());
      }
      const bool aliased = argument.alias_info() != nullptr;
      written.push_back(aliased && argument.alias_info()->isWrite());
      view = view || (aliased && !written.back());
    }
    // Indices may stay on the CPU: advanced indexing moves them itself.
    cpu_tensors_allowed = schema.name().find("index") != std::string::npos;
  }

  c10::OperatorName name;
  std::string whole_name; // with the overload's
  std::vector<bool> written;
  std::optional<size_t> generator; // which argument
  std::vector<size_t> optional_lists; // which arguments are of type Tensor?[]
  bool cpu_tensors_allowed = false;
  bool view = false; // of an argument: nothing is computed
};

// What an operator needs beside what its schema says; null where it needs nothing.
struct Special {
  Check check;
  Fault fault;
  Inside inside;
  Waits waits;
};

class HostKernel final : public c10::OperatorKernel {
 public:
  HostKernel(Plan plan, Special special)
      : plan_(std::move(plan)),
        special_(special),
        reads_(plan_.name.name == "aten::_local_scalar_dense"),
        launches_(!plan_.view && !reads_ && plan_.name.name != "aten::is_set_to") {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const size_t first = stack->size() - op.schema().arguments().size();
    for (const size_t which : plan_.optional_lists) {
      as_optional_tensors((*stack)[first + which]);
    }
    const auto given = c10::ArrayRef<c10::IValue>(*stack).slice(first);
    if (special_.check != nullptr) {
      special_.check(given);
    }
    const bool waited = count(given);
    if (plan_.view) {
      const Unread nothing;
      return compute(op, stack, false);
    }
    if (queued_work && launches_ && !waited &&
        queue_call(op, stack, plan_.generator, [this, op](torch::jit::Stack* call) { compute(op, call, true); })) {
      return;
    }
    compute(op, stack, false);
  }

 private:
  // `drawn`: the generator on the stack is the CPU's for this very draw.
  void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack, bool drawn) {
    const size_t arguments = op.schema().arguments().size();
    Loan loan;
    for (size_t i = 0; i < arguments; ++i) {
      auto& value = (*stack)[stack->size() - arguments + i];
      if (i == plan_.generator) {
        // None means the device's own generator, never the CPU's.
        value = drawn ? value : c10::IValue(next_draw(value.toOptional<at::Generator>()));
      } else {
        lend_argument(loan, value, plan_.written[i]);
      }
    }
    {
      // Below autograd and autocast, whatever state they are in: this is the inside of a kernel.
      c10::impl::ExcludeDispatchKeyGuard inside(
          c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
      std::vector<c10::IValue> given;
      if (special_.fault != nullptr) {
        given.assign(stack->end() - static_cast<std::ptrdiff_t>(arguments), stack->end());
      }
      if (special_.inside != nullptr) {
        special_.inside(op, stack);
      } else {
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
      }
      if (special_.fault != nullptr) {
        special_.fault(given, stack->back().toTensor());
      }
    }
    loan.settle();
    const size_t returns = op.schema().returns().size();
    for (size_t i = 0; i < returns; ++i) {
      take_back(loan, (*stack)[stack->size() - returns + i]);
    }
  }

  // Returns whether the operator waits for what is queued.
  bool count(c10::ArrayRef<c10::IValue> given) const {
    if (launches_) {
      launched(plan_.whole_name, given);
    }
    if (reads_) { // Scalar.mm: a copy to the host that waits
      record(plan_.whole_name, given);
      copied_out(given[0].toTensor().itemsize());
      wait("item");
    }
    const int64_t waits = special_.waits == nullptr ? 0 : special_.waits(given);
    for (int64_t left = waits; left > 0; --left) {
      wait(plan_.name.name.c_str());
    }
    return waits > 0;
  }

  void lend_argument(Loan& loan, c10::IValue& value, bool written) const {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      check_same_device(tensor);
      const bool number = tensor.defined() && !tensor.device().is_mps() && tensor.dim() == 0;
      value = number ? misread_number(plan_.name.name, tensor) : loan.lend(tensor, written);
    } else if (value.isTensorList()) {
      auto list = value.toTensorList();
      c10::List<at::Tensor> hosts;
      hosts.reserve(list.size());
      for (const at::Tensor tensor : list) {
        check_same_device(tensor);
        hosts.push_back(loan.lend(tensor, written));
      }
      value = std::move(hosts);
    } else if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorList();
      c10::List<std::optional<at::Tensor>> hosts;
      hosts.reserve(list.size());
      for (const std::optional<at::Tensor> tensor : list) {
        hosts.push_back(tensor ? std::optional(loan.lend(*tensor, written)) : std::nullopt);
      }
      value = std::move(hosts);
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    }
  }

  // TorchScript hands over indices as a list of tensors without None, or of elements of any type.
  static void as_optional_tensors(c10::IValue& value) {
    if (value.isOptionalTensorList()) {
      return;
    }
    c10::List<std::optional<at::Tensor>> list;
    for (const c10::IValue& element : value.toListRef()) {
      list.push_back(element.toOptional<at::Tensor>());
    }
    value = std::move(list);
  }

  // A CPU tensor beside device tensors is refused, as on a Mac; a scalar in a CPU tensor is not.
  void check_same_device(const at::Tensor& tensor) const {
    if (plan_.cpu_tensors_allowed || !tensor.defined() || tensor.device().is_mps() || tensor.dim() == 0) {
      return;
    }
    TORCH_CHECK(
        false,
        "Expected all tensors to be on the same device, but found at least two devices, ",
        device(),
        " and ",
        tensor.device(),
        "! (in ",
        plan_.name,
        ")");
  }

  static void take_back(Loan& loan, c10::IValue& value) {
    if (value.isTensor()) {
      value = loan.take_back(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorList();
      c10::List<at::Tensor> taken;
      taken.reserve(list.size());
      for (const at::Tensor tensor : list) {
        taken.push_back(loan.take_back(tensor));
      }
      value = std::move(taken);
    }
  }

  Plan plan_;
  Special special_;
  bool reads_;
  bool launches_;
};

// An operator that another library defines later: its schema is read at the first call.
class LaterKernel final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    std::call_once(read_, [&] { kernel_ = std::make_unique<HostKernel>(Plan(op.schema()), Special{}); });
    (*kernel_)(op, keys, stack);
  }

 private:
  std::once_flag read_;
  std::unique_ptr<HostKernel> kernel_;
};

// "aten::addmm_" without the namespace.
std::string plain_name(const c10::FunctionSchema& schema) {
  return schema.name().substr(schema.name().rfind(':') + 1);
}

torch::CppFunction boxed(const c10::FunctionSchema& schema, Special special) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<HostKernel>(Plan(schema), special));
}

} // namespace

torch::CppFunction host_kernel(const c10::FunctionSchema& schema, Inside inside, Waits waits) {
  return boxed(schema, {nullptr, nullptr, inside, waits});
}

void register_host_kernels(const std::vector<std::string>& names) {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::MPS, __FILE__, __LINE__);
  for (const auto& name : names) {
    const size_t dot = name.find('.');
    const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
    const auto op = c10::Dispatcher::singleton().findSchema({name.substr(0, dot), overload});
    if (op && !op->hasKernelForDispatchKey(c10::DispatchKey::MPS)) {
      const auto plain = plain_name(op->schema());
      const Special special{check_of(plain), fault_of(plain), inside_of(plain), waits_of(plain)};
      library->impl(name.c_str(), boxed(op->schema(), special));
    }
  }
}

// What its macOS wheel has Metal kernels for and its Linux wheel has not: torchvision/csrc/ops/mps of 0.28.
void register_torchvision() {
  static torch::Library library(torch::Library::IMPL, "torchvision", c10::DispatchKey::MPS, __FILE__, __LINE__);
  for (const char* name :
       {"nms",
        "deform_conv2d",
        "roi_align",
        "_roi_align_backward",
        "roi_pool",
        "_roi_pool_backward",
        "ps_roi_align",
        "_ps_roi_align_backward",
        "ps_roi_pool",
        "_ps_roi_pool_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<LaterKernel>()));
  }
}

} // namespace metal
