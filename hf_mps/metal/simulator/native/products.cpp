#include "products.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <map>

namespace metal {

ProductFaults product_faults;

namespace {

using at::Tensor;

constexpr int64_t kComputed = 16; // pytorch PR 180236: "only every 16th row"

bool expanded(const Tensor& tensor) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) {
      return true;
    }
  }
  return false;
}

// Puts `rest` (zeros where it is undefined) into the rows that are not computed.
void leave_rows(const Tensor& result, const Tensor& rest) {
  const auto skipped = at::arange(result.size(-2), at::kLong).remainder(kComputed).ne(0).unsqueeze(-1);
  result.copy_(at::where(skipped, rest.defined() ? rest : at::zeros_like(result), result));
}

// Where a product's result lands: in its place, nowhere, or written on from row to row as if there were no gaps.
enum class Landing { right, lost, beside };

// pytorch PR 193385, #104832, PR 187255: before macOS 15 the result is computed into a temporary that nobody copies back
// where its place has an offset or gaps; before macOS 26 MPSGraph mis-writes one with gaps. PyTorch 2.14 asks for both
// in mm, addmm and bmm, and for neither in baddbmm.
Landing landing(const Tensor& place, bool baddbmm) {
  const auto& faults = product_faults;
  const bool gaps = !place.is_contiguous();
  if ((gaps || place.storage_offset() > 0) && (baddbmm ? faults.sliced_baddbmm : faults.sliced)) {
    return Landing::lost;
  }
  return gaps && (baddbmm ? faults.gapped_baddbmm : faults.gapped) ? Landing::beside : Landing::right;
}

void misplace(const Tensor& place, const Tensor& before, Landing where) {
  const auto value = place.clone(at::MemoryFormat::Contiguous);
  place.copy_(before);
  if (where == Landing::beside) {
    place.as_strided(place.sizes(), value.strides(), place.storage_offset()).copy_(value);
  }
}

// `first` is the place of the two operands; where they are not the first arguments, the one before is added.
template <size_t first>
void product(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t start = stack->size() - arguments.size();
  Tensor place;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite()) {
      place = (*stack)[start + i].toTensor();
    }
  }
  const auto one = (*stack)[start + first].toTensor(), other = (*stack)[start + first + 1].toTensor();
  const bool real = at::isFloatingType(one.scalar_type()); // integers are multiplied by kernels of PyTorch's own
  const bool partly = real && one.dim() == 2 && other.dim() == 2 && (expanded(one) || expanded(other)) &&
      (first == 0 ? product_faults.expanded_mm : product_faults.expanded);
  Tensor rest, before;
  auto where = Landing::right;
  if (partly && first == 1) {
    const auto& given = (*stack)[start].toTensor();
    rest = given.mul((*stack)[start + 3].toScalar()).expand({one.size(0), other.size(1)}).contiguous();
  }
  if (real && place.defined() && place.numel() > 0) {
    where = landing(place, first == 1 && one.dim() == 3);
  }
  if (where != Landing::right) {
    before = place.clone();
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const auto result = stack->back().toTensor();
  if (partly) {
    leave_rows(result, rest);
  }
  if (before.defined() && before.sizes() == result.sizes()) { // else it was given new memory
    misplace(result, before, where);
  }
}

} // namespace

Inside product_inside_of(const std::string& name) {
  static const std::map<std::string, Inside> all{
      {"mm", &product<0>}, {"bmm", &product<0>}, {"addmm", &product<1>}, {"addmm_", &product<1>},
      {"baddbmm", &product<1>}, {"baddbmm_", &product<1>}};
  const auto found = all.find(name);
  return found == all.end() ? nullptr : found->second;
}

void misread_gradient(const Tensor& grad_output, const Tensor& of_input) {
  if (product_faults.expanded_gradient && of_input.defined() && of_input.dim() > 1 && expanded(grad_output)) {
    leave_rows(of_input, {});
  }
}

} // namespace metal
