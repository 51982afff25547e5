// Kernels that are right about their tensors' sizes and wrong about what lies in them: a number, a volume, a result.
#include "boxed.h"
#include "dtypes.h"
#include "misread.h"
#include "products.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <vector>

namespace metal {

std::atomic<bool> conv3d_layout{false};
Misreads misreads;

namespace {

// pytorch#196067: the weight is bound in its own dtype, and declared in that of the tensors. A float64 is made float32
// first (OperationUtils.h, mtl_setBuffer).
void lerp(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const auto dtype = (*stack)[first].toTensor().scalar_type();
  auto& weight = (*stack)[first + 2];
  if (misreads.lerp_weight && weight.isTensor() && weight.toTensor().scalar_type() != dtype) {
    auto given = weight.toTensor();
    given = given.scalar_type() == at::kDouble ? given.to(at::kFloat) : given;
    auto read = at::empty({}, given.options().dtype(dtype)).zero_();
    const auto bytes = std::min(read.nbytes(), given.nbytes());
    std::memcpy(read.mutable_data_ptr(), given.const_data_ptr(), bytes);
    weight = read;
  }
  call(op, stack);
}

// pytorch#194922, PR 195147: beyond four dimensions MPSGraph writes over what it has copied, with the padding mostly,
// from 65,536 elements on in the last dimension or in all behind the first one that is padded. More than three pairs of
// numbers are no graph.
constexpr int64_t kPadded = 1 << 16;

bool loses_what_it_pads(c10::IntArrayRef padded, c10::IntArrayRef padding) {
  if (!misreads.large_pad || padded.size() < 5 || padding.size() > 6) {
    return false;
  }
  int64_t behind = 0;
  int64_t product = 1;
  for (size_t pair = 0; pair < padding.size() / 2; ++pair) {
    behind = padding[2 * pair] != 0 || padding[2 * pair + 1] != 0 ? product : behind;
    product *= padded[padded.size() - 1 - pair];
  }
  return behind > 0 && std::max(behind, padded.back()) >= kPadded;
}

void pad(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const bool backward = (*stack)[first + 1].isTensor();
  const auto padding = (*stack)[first + (backward ? 2 : 1)].toIntVector();
  const auto grad = (*stack)[first].toTensor();
  const at::Scalar value = op.schema().name() == "aten::constant_pad_nd" ? (*stack)[first + 2].toScalar() : 0;
  // Metal pads bools, which the CPU does not.
  const auto by_dtype = dtype_inside_of(op.schema().name().substr(sizeof("aten::") - 1));
  by_dtype == nullptr ? call(op, stack) : by_dtype(op, stack);
  const auto result = stack->back().toTensor();
  if (loses_what_it_pads(backward ? grad.sizes() : result.sizes(), padding)) {
    result.fill_(value);
  }
}

// ScanKernel.mm: the host takes the stride of the dimension for the number of columns, and of one row that may be any
// number. Columns beyond stay as they were. What a Mac writes behind a result, where the stride is larger, is not
// imitated: it would be other tensors' memory here too.
void scan(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size());
  const auto given = arguments->toTensor();
  const bool extremes = schema.returns().empty(); // values and indices are arguments, between the tensor and `dim`
  const auto rank = given.dim();
  const auto asked = (arguments + (extremes ? 3 : 1))->toInt();
  const auto dim = asked < 0 ? asked + rank : asked;
  if (!misreads.lone_scans || dim < 0 || dim >= rank - 1 || given.size(dim) != 1 || !given.is_contiguous()) {
    return call(op, stack);
  }
  std::vector<at::Tensor> targets;
  for (auto argument = arguments + 1; argument != stack->end(); ++argument) {
    if (argument->isTensor()) {
      targets.push_back(argument->toTensor());
    }
  }
  std::vector<at::Tensor> before;
  before.reserve(targets.size() + 1);
  for (const auto& target : targets) {
    before.push_back(target.clone());
  }
  call(op, stack);
  if (targets.empty() && !schema.is_mutable("self")) {
    targets.push_back(stack->back().toTensor());
    before.push_back(at::zeros_like(targets.back()));
  }
  int64_t written = given.stride(dim);
  for (int64_t outer = 0; outer < dim; ++outer) {
    written *= given.size(outer);
  }
  for (size_t each = 0; each < targets.size(); ++each) {
    if (targets[each].is_contiguous() && before[each].sizes() == targets[each].sizes() && written < given.numel()) {
      targets[each].view(-1).slice(0, written).copy_(before[each].view(-1).slice(0, written));
    }
  }
}

const std::set<std::string>& with_numbers() {
  static const auto* all = new std::set<std::string>{
      "aten::add", "aten::add_", "aten::sub", "aten::sub_", "aten::mul", "aten::mul_", "aten::div", "aten::div_",
      "aten::lerp", "aten::lerp_"};
  return *all;
}

// SummaryOps.mm: weights of any other dtype are cut to int32 and summed as such, where the CPU sums them as float64.
void bincount(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& weights = (*stack)[stack->size() - 2];
  std::optional<at::ScalarType> sum;
  if (weights.isTensor() && (*stack)[stack->size() - 3].toTensor().numel() > 0) {
    const auto given = weights.toTensor().scalar_type();
    sum = given == at::kFloat || given == at::kHalf ? given : at::kInt;
    weights = weights.toTensor().to(*sum);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (sum) {
    stack->back() = stack->back().toTensor().to(*sum);
  }
}

} // namespace

// pytorch#187117: OperationUtils.h, mtl_setBuffer gives the kernel the bytes at the beginning of the storage; those of
// 64-bit floating point are read where they lie, to make them narrower.
at::Tensor misread_number(const std::string& name, const at::Tensor& number) {
  const bool wide = number.scalar_type() == at::kDouble || number.scalar_type() == at::kComplexDouble;
  if (!misreads.scalar_views || wide || number.storage_offset() == 0 || with_numbers().count(name) == 0) {
    return number;
  }
  return number.as_strided({}, {}, 0);
}

// pytorch#176159: before macOS 15 such a result is gathered into memory of its own, and nothing writes it back. What is
// deterministic, and what Metal cannot add atomically, is left to index_put_.
void index_add_into_gaps(const c10::OperatorHandle& op, torch::jit::Stack* stack, Inside compute) {
  const auto& schema = op.schema();
  if (!misreads.index_add_gaps || !schema.is_mutable() || at::globalContext().deterministicAlgorithms()) {
    return compute(op, stack);
  }
  const size_t first = stack->size() - schema.arguments().size();
  const auto result = (schema.is_mutable("self") ? (*stack)[first] : stack->back()).toTensor();
  const auto dtype = result.scalar_type();
  const bool graph = dtype != at::kLong && !at::isComplexType(dtype);
  if (!graph || (result.is_contiguous() && result.storage_offset() == 0)) {
    return compute(op, stack);
  }
  const auto before = result.clone();
  compute(op, stack);
  if (before.sizes() == result.sizes()) {
    result.copy_(before);
  }
}

// pytorch#197114: as if its channels lay last, which is right where they do.
at::Tensor misread_volume(const at::Tensor& input) {
  if (!conv3d_layout || input.dim() != 5 || !input.is_contiguous()) {
    return input;
  }
  const auto shape = input.sizes();
  return input.view({shape[0], shape[2], shape[3], shape[4], shape[1]}).permute({0, 4, 1, 2, 3});
}

Inside misread_inside_of(const std::string& name) {
  if (const auto product = product_inside_of(name)) {
    return product;
  }
  if (const auto unwritten = unwritten_inside_of(name)) {
    return unwritten;
  }
  static const std::map<std::string, Inside> all{
      {"bincount", &bincount},
      {"cumsum", &scan},
      {"cumprod", &scan},
      {"_logcumsumexp", &scan},
      {"_cummax_helper", &scan},
      {"_cummin_helper", &scan},
      {"lerp", &lerp},
      {"lerp_", &lerp},
      {"constant_pad_nd", &pad},
      {"reflection_pad3d", &pad},
      {"reflection_pad3d_backward", &pad},
      {"replication_pad3d", &pad},
      {"replication_pad3d_backward", &pad},
  };
  const auto found = all.find(name);
  if (found != all.end()) {
    return found->second;
  }
  const auto by_dtype = dtype_inside_of(name);
  return by_dtype == nullptr ? permuted_inside_of(name) : by_dtype;
}

} // namespace metal
