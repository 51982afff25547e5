// Sparse COO tensors, for which torch's table lists kernels of the keys SparseMPS and SparseCsrMPS.
//
// Most are the functions that serve the CPU too, made of other operators on indices and values: on a Mac those run on
// the device, and so they do here. The few that Metal alone has are run by the CPU's kernels over the same memory, with
// the refusals and the coalesced results of aten/src/ATen/native/sparse/mps/SparseMPSTensorMath.mm.
#include "boxed.h"

#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/result_type.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <map>
#include <optional>
#include <set>

namespace metal {
namespace {

using at::Tensor;
using c10::DispatchKey;

// These choose a kernel by the device inside (DispatchStub), and a wheel without Metal has none for it.
const std::set<std::string> kChooseByDevice{"aten::sparse_mask", "aten::_sparse_mask_projection"};

template <DispatchKey on_cpu>
void shared(const Operator& op, Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(on_cpu), stack);
}

void call_sparse(const Operator& op, Stack* stack) {
  shared<DispatchKey::SparseCPU>(op, stack);
}

// Lets the sparse `out` be `result`, in its own dtype.
void become(const Tensor& out, const Tensor& result) {
  out.sparse_resize_and_clear_(result.sizes(), result.sparse_dim(), result.dense_dim());
  at::sparse::alias_into_sparse(out, result._indices(), result._values().to(out.scalar_type()));
  out._coalesced_(result.is_coalesced());
}

// The sum of two sparse tensors is coalesced on Metal, and there in half precision too.
void add_out(const Operator& op, Stack* stack) {
  const auto self = argument(op, stack, 0).toTensor();
  const auto other = argument(op, stack, 1).toTensor();
  const auto alpha = argument(op, stack, 2).toScalar();
  const auto out = argument(op, stack, 3).toTensor();
  if (!self.is_sparse() || !other.is_sparse() || self._nnz() == 0 || other._nnz() == 0) {
    return call_sparse(op, stack);
  }
  TORCH_CHECK(
      self.sizes() == other.sizes(), "add: expected 'self' and 'other' to have same size, but ", self.sizes(), " != ",
      other.sizes());
  TORCH_CHECK(
      at::sparse::is_same_density(self, other), "add: expected 'self' and 'other' to have same density, but 'self' has ",
      self.sparse_dim(), " sparse dimensions while 'other' has ", other.sparse_dim(), " sparse dimensions");
  const auto dtype = at::result_type(self, other);
  TORCH_CHECK(
      canCast(dtype, out.scalar_type()), "Can't convert result type ", dtype, " to output ", out.scalar_type());
  const auto values = at::cat({self._values().to(dtype), other._values().mul(alpha).to(dtype)}, 0);
  const auto sum = at::_sparse_coo_tensor_unsafe(
      at::cat({self._indices(), other._indices()}, 1), values, self.sizes(), self.options().dtype(dtype));
  become(out, sum.coalesce());
  torch::jit::drop(stack, op.schema().arguments().size());
  stack->emplace_back(out);
}

// Metal broadcasts neither side's sparse dimensions.
void mul_out(const Operator& op, Stack* stack) {
  const auto self = argument(op, stack, 0).toTensor();
  const auto other = argument(op, stack, 1).toTensor();
  const auto out = argument(op, stack, 2).toTensor();
  if (!self.is_sparse() || !other.is_sparse()) {
    const auto& dense = self.is_sparse() ? other : self;
    const auto& sparse = self.is_sparse() ? self : other;
    TORCH_CHECK(
        dense.numel() == 1 || dense.sizes() == sparse.sizes(),
        "mul(dense, sparse): sizes must match exactly (no broadcasting): ", dense.sizes(), " vs ", sparse.sizes());
    return call_sparse(op, stack);
  }
  TORCH_CHECK(
      self.sparse_dim() == other.sparse_dim(), "mul(sparse, sparse): must have same sparse_dim, got ",
      self.sparse_dim(), " vs ", other.sparse_dim());
  TORCH_CHECK(
      self.sizes().slice(0, self.sparse_dim()) == other.sizes().slice(0, self.sparse_dim()),
      "mul(sparse, sparse): sparse sizes must match exactly.");
  call_sparse(op, stack);
  if (!out.is_coalesced()) {
    become(out, out.coalesce());
  }
}

bool narrow(c10::ScalarType dtype) {
  return dtype == c10::kHalf || dtype == c10::kBFloat16;
}

// What Metal computes and the CPU has no kernel for: half precision, and integers in a product of two sparse matrices.
void in_double(const Operator& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const bool whole_numbers = op.schema().name() == "aten::_sparse_sparse_matmul";
  std::optional<c10::ScalarType> dtype;
  Tensor out;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = argument(op, stack, i);
    if (!value.isTensor()) {
      continue;
    }
    const auto given = value.toTensor();
    const auto own = given.scalar_type();
    if (!narrow(own) && !(whole_numbers && isIntegralType(own, /*includeBool=*/false))) {
      continue;
    }
    dtype = own;
    if (arguments[i].alias_info() != nullptr) {
      out = given;
      value = at::empty(given.sizes(), given.options().dtype(c10::kDouble));
    } else {
      value = given.to(c10::kDouble);
    }
  }
  call_sparse(op, stack);
  if (out.defined()) {
    out.resize_(stack->back().toTensor().sizes());
    out.copy_(stack->back().toTensor());
    stack->back() = out;
  } else if (dtype) {
    stack->back() = stack->back().toTensor().to(*dtype);
  }
}

Inside inside_sparse(const std::string& name) {
  static const std::map<std::string, Inside> all{
      {"aten::add", &add_out},
      {"aten::mul", &mul_out},
      {"aten::bmm", &in_double},
      {"aten::_sparse_sparse_matmul", &in_double},
      {"aten::_sparse_softmax", &in_double},
      {"aten::_sparse_log_softmax", &in_double},
      {"aten::_sparse_softmax_backward_data", &in_double},
      {"aten::_sparse_log_softmax_backward_data", &in_double},
  };
  const auto found = all.find(name);
  return found == all.end() ? &call_sparse : found->second;
}

// Where Metal reads how many places there are, or are in both: SparseMPSTensor.mm, SparseMPSTensorMath.mm.
bool is_sparse(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().is_sparse();
}

int64_t of_coalesce(c10::ArrayRef<c10::IValue> given) {
  return given[0].toTensor()._nnz() > 1 ? 1 : 0;
}

int64_t of_two_sparse(c10::ArrayRef<c10::IValue> given) {
  return is_sparse(given[0]) && is_sparse(given[1]) ? 1 : 0;
}

// A product with a dense matrix coalesces the sparse one, which comes first but for what the product is added to.
template <size_t sparse>
int64_t of_product(c10::ArrayRef<c10::IValue> given) {
  const auto matrix = given[sparse].toTensor();
  return matrix.is_sparse() && !matrix.is_coalesced() && matrix._nnz() > 1 ? 1 : 0;
}

// The least and the largest index, the number of places, and repeat_interleave's two.
int64_t of_index_select(c10::ArrayRef<c10::IValue>) {
  return 5;
}

// The number of products, repeat_interleave's two, and the coalescing of the result.
int64_t of_sparse_product(c10::ArrayRef<c10::IValue>) {
  return 4;
}

Waits waits_sparse(const std::string& name) {
  static const std::map<std::string, Waits> all{
      {"aten::_coalesce", &of_coalesce},
      {"aten::add", &of_two_sparse},
      {"aten::addmm", &of_product<1>},
      {"aten::bmm", &of_product<0>},
      {"aten::mul", &of_two_sparse},
      {"aten::sparse_mask", &of_two_sparse},
      {"aten::_sparse_mask_projection", &of_two_sparse},
      {"aten::index_select", &of_index_select},
      {"aten::_sparse_sparse_matmul", &of_sparse_product},
  };
  const auto found = all.find(name);
  return found == all.end() ? nullptr : found->second;
}

torch::CppFunction kernel(const c10::FunctionSchema& schema, bool same_as_cpu, bool compressed) {
  if (!same_as_cpu || kChooseByDevice.count(schema.name()) > 0) {
    return host_kernel(schema, inside_sparse(schema.name()), waits_sparse(schema.name()));
  }
  return compressed ? torch::CppFunction::makeFromBoxedFunction<&shared<DispatchKey::SparseCsrCPU>>()
                    : torch::CppFunction::makeFromBoxedFunction<&shared<DispatchKey::SparseCPU>>();
}

} // namespace

void register_sparse(const SparseKernels& kernels) {
  for (const auto& [layout, operators] : kernels) {
    const auto key = c10::parseDispatchKey(layout);
    auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    for (const auto& [name, same_as_cpu] : operators) {
      const size_t dot = name.find('.');
      const auto op = c10::Dispatcher::singleton().findSchema(
          {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
      if (op) {
        library->impl(name.c_str(), kernel(op->schema(), same_as_cpu, key == DispatchKey::SparseCsrMPS));
      }
    }
  }
}

} // namespace metal
