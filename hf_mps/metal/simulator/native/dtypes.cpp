// Which dtypes Metal's kernels take, and what they make of them where that is not what the CPU makes of them: operators
// that refuse a dtype which the CPU computes, operators that compute one which the CPU refuses, and other results.
// Sources: aten/src/ATen/native/mps/operations at v2.13.0, the texts and kernels of the macOS wheel of 2.13.0, and
// PyTorch's lists for its Mac runners (torch/testing/_internal/common_mps.py), which scripts/tools/calibrate.py compares.
#include "boxed.h"
#include "dtypes.h"

#include <ATen/native/TypeProperties.h>
#include <ATen/ops/_linalg_check_errors.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_cholesky_ex.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <utility>

namespace metal {

std::atomic<bool> dtype_results{false};

namespace {

using at::Tensor;

// ---- refused ----

bool is_float32(at::ScalarType dtype) {
  return dtype == at::kFloat;
}

bool is_real(at::ScalarType dtype) {
  return !at::isComplexType(dtype);
}

bool is_floating(at::ScalarType dtype) {
  return at::isFloatingType(dtype);
}

bool is_no_byte(at::ScalarType dtype) {
  return dtype != at::kByte;
}

struct Rule {
  const char* name;
  size_t argument;
  bool (*takes)(at::ScalarType);
  const char* text;
  int until = 99; // torch 2.…, which takes it
};

constexpr const char* kFactor = "linalg.lu_factor(): MPS doesn't support complex types.";
constexpr const char* kSolve = "linalg.lu_factor(): MPS only supports floats.";
constexpr const char* kTriangular = "linalg.solve.triangular(); Only float is supported!";

// LinearAlgebra.mm, UpSample.mm, RenormKernel.mm; the texts are in the wheels of 2.13.0 and 2.14.1. Half-precision
// matrices are refused before, by the checks that all devices share.
constexpr std::array kRules{
    Rule{"linalg_lu_factor_ex", 0, &is_real, kFactor, 15},
    Rule{"linalg_lu", 0, &is_real, kFactor, 15},
    Rule{"_linalg_det", 0, &is_real, kFactor, 15},
    Rule{"_linalg_slogdet", 0, &is_real, kFactor, 15},
    Rule{"_linalg_solve_ex", 0, &is_real, kMinor < 14 ? kSolve : kFactor, 15},
    Rule{"linalg_inv_ex", 0, &is_real, "linalg_inv: not supported for complex types yet!"},
    Rule{"linalg_solve_triangular", 0, &is_float32, kTriangular, 15},
    Rule{"triangular_solve", 0, &is_float32, kTriangular, 15},
    Rule{"_cholesky_solve_helper", 0, &is_float32, kTriangular, 15},
    Rule{"cholesky_inverse", 0, &is_real, "cholesky_inverse: MPS only supports float type!"},
    Rule{"linalg_qr", 0, &is_real, "linalg_qr: MPS currently supports float32 only"},
    Rule{"_upsample_bilinear2d_aa", 0, &is_floating,
         "_upsample_bilineard2d_aa_out_mps only supports floating-point dtypes"},
    Rule{"_upsample_bicubic2d_aa", 0, &is_floating,
         "_upsample_bicubic2d_aa_out_mps only supports floating-point dtypes"},
    // The library has these kernels for the floating dtypes alone.
    Rule{"upsample_bicubic2d", 0, &is_no_byte,
         "Failed to create function state object for: upsample_bicubic2d_uchar"},
    Rule{"renorm", 0, &is_real, "Failed to create function state object for: renorm_float2"},
    Rule{"renorm_", 0, &is_real, "Failed to create function state object for: renorm_float2"},
};

template <size_t Row>
void refuse(Arguments in) {
  constexpr const Rule& rule = kRules[Row];
  const auto& tensor = in[rule.argument].toTensor();
  if (refusals && kMinor < rule.until && tensor.defined() && !rule.takes(tensor.scalar_type())) {
    TORCH_CHECK(false, rule.text);
  }
}

template <size_t... Rows>
std::map<std::string, Check> checks(std::index_sequence<Rows...>) {
  return {{kRules[Rows].name, &refuse<Rows>}...};
}

// ---- computed, where the CPU has no kernel ----

// By operator: h float16, b bfloat16, o bool, i the integers.
const std::map<std::string, std::string>& more_dtypes() {
  static const auto* all = new std::map<std::string, std::string>{
      {"_cdist_forward", "hb"},
      {"avg_pool3d", "hbo"},
      {"bernoulli", "o"},
      {"ceil", "o"},
      {"dot", "o"},
      {"floor", "o"},
      {"floor_divide", "o"},
      {"fmod", "o"},
      {"histc", "i"},
      {"max_pool2d_with_indices", "o"},
      {"polar", "h"},
      {"pow", "o"},
      {"reflection_pad1d", "o"},
      {"reflection_pad2d", "o"},
      {"reflection_pad3d", "o"},
      {"remainder", "o"},
      {"replication_pad1d", "o"},
      {"replication_pad2d", "o"},
      {"replication_pad3d", "o"},
      {"silu", "o"},
      {"special_bessel_j0", "hb"},
      {"special_bessel_j1", "hb"},
      {"special_bessel_y0", "hb"},
      {"special_bessel_y1", "hb"},
      {"special_chebyshev_polynomial_t", "hb"},
      {"special_chebyshev_polynomial_u", "hb"},
      {"special_chebyshev_polynomial_v", "hb"},
      {"special_chebyshev_polynomial_w", "hb"},
      {"special_erfcx", "hb"},
      {"special_hermite_polynomial_h", "hb"},
      {"special_hermite_polynomial_he", "hb"},
      {"special_modified_bessel_i0", "hb"},
      {"special_modified_bessel_i1", "hb"},
      {"special_modified_bessel_k0", "hb"},
      {"special_modified_bessel_k1", "hb"},
      {"special_scaled_modified_bessel_k0", "hb"},
      {"special_scaled_modified_bessel_k1", "hb"},
      {"special_shifted_chebyshev_polynomial_t", "hb"},
      {"special_shifted_chebyshev_polynomial_u", "hb"},
      {"special_shifted_chebyshev_polynomial_v", "hb"},
      {"special_shifted_chebyshev_polynomial_w", "hb"},
      {"special_spherical_bessel_j0", "hb"},
      {"special_zeta", "hb"},
      {"threshold", "o"},
      {"trace", "o"},
      {"trunc", "o"},
      {"vdot", "o"},
  };
  return *all;
}

std::string plain(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  return name.substr(name.rfind(':') + 1);
}

bool among(const std::string& dtypes, at::ScalarType dtype) {
  const char letter = dtype == at::kHalf ? 'h'
      : dtype == at::kBFloat16           ? 'b'
      : dtype == at::kBool               ? 'o'
      : at::isIntegralType(dtype, false) ? 'i'
                                         : '-';
  return dtypes.find(letter) != std::string::npos;
}

// What an operator computes in float32 and writes into tensors of another dtype.
struct Written {
  Tensor target;
  Tensor found;
};

// float32 stands in for `dtype` in the arguments, of which `written` are to be written.
std::vector<Written> widen(const c10::OperatorHandle& op, Stack* stack, at::ScalarType dtype) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  std::vector<Written> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    if (!value.isTensor() || !value.toTensor().defined()) {
      continue;
    }
    const Tensor given = value.toTensor();
    const bool complex = given.scalar_type() == at::kComplexHalf;
    if (given.scalar_type() != dtype && !complex) {
      continue;
    }
    const auto wide = complex ? at::kComplexFloat : at::kFloat;
    const auto* alias = arguments[i].alias_info();
    const bool is_written = alias != nullptr && alias->isWrite();
    const bool is_out = is_written && arguments[i].kwarg_only();
    value = is_out ? at::empty({0}, given.options().dtype(wide)) : given.to(wide);
    if (is_written) {
      written.push_back({given, value.toTensor()});
    }
  }
  return written;
}

void compute_widened(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size(), results = op.schema().returns().size();
  const auto name = plain(op);
  std::vector<Tensor> tensors;
  for (const auto& value : c10::ArrayRef<c10::IValue>(*stack).slice(stack->size() - count)) {
    if (value.isTensor() && value.toTensor().defined()) {
      tensors.push_back(value.toTensor());
    }
  }
  // A number beside a tensor of bools makes the CPU compute in the number's dtype.
  const bool promoted = op.schema().overload_name().find("Scalar") != std::string::npos;
  const auto dtype = tensors.empty() ? at::kFloat
      : name == "polar"              ? tensors[0].scalar_type()
                                     : at::native::result_type(tensors);
  const auto known = more_dtypes().find(name.back() == '_' ? name.substr(0, name.size() - 1) : name);
  if (promoted || !among(known->second, dtype)) {
    return call(op, stack);
  }
  const auto written = widen(op, stack, dtype);
  call(op, stack);
  for (const auto& [target, found] : written) {
    target.resize_(found.sizes());
    target.copy_(found);
  }
  for (auto at = stack->end() - static_cast<std::ptrdiff_t>(results); at != stack->end(); ++at) {
    const Tensor found = at->toTensor();
    const auto same = std::find_if(
        written.begin(), written.end(), [&](const Written& each) { return each.found.is_same(found); });
    if (same != written.end()) {
      *at = same->target;
    } else if (found.scalar_type() == at::kFloat) {
      *at = found.to(name == "trace" ? at::kLong : dtype);
    } else if (found.scalar_type() == at::kComplexFloat) {
      *at = found.to(at::kComplexHalf);
    }
  }
}

// ---- other results ----

// Sort.mm: Metal's own kernels keep the order of equal elements whether asked to or not.
void sort(const c10::OperatorHandle& op, Stack* stack) {
  if (dtype_results) {
    (*stack)[stack->size() - op.schema().arguments().size() + 1] = true;
  }
  call(op, stack);
}

// ReduceOps.mm, std_var_common_impl_mps: the result has the input's dtype. The numbers that
// MPSGraph computes are not known; these are the CPU's.
void variance(const c10::OperatorHandle& op, Stack* stack) {
  const auto input = (*stack)[stack->size() - op.schema().arguments().size()].toTensor();
  call(op, stack);
  auto& found = (*stack)[stack->size() - op.schema().returns().size()];
  if (dtype_results && kMinor < 15 && input.is_complex()) {
    found = found.toTensor().to(input.scalar_type());
  }
}

// ReduceOps.mm, median_out_mps_common: in a row of NaN alone it reads element -1, and masked.median, which makes such
// rows, is listed as failing. That the result is 0 is inferred: MPSGraph's gather gives 0 out of range (#144824).
void nanmedian(const c10::OperatorHandle& op, Stack* stack) {
  const bool along = op.schema().arguments().size() > 1;
  call(op, stack);
  if (dtype_results && kMinor < 14 && along) {
    const auto values = (*stack)[stack->size() - op.schema().returns().size()].toTensor();
    if (values.is_floating_point()) {
      values.masked_fill_(values.isnan(), 0);
    }
  }
}

// Activation.mm, log_softmax_mps_out: a graph in the input's dtype; 2.15's wheel has a kernel in its place. That MPSGraph
// rounds each step to bfloat16 is inferred: log_softmax with dtype=torch.bfloat16 is listed as failing where the test
// allows less than such rounding.
void log_softmax(const c10::OperatorHandle& op, Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const auto given = (*stack)[first].toTensor();
  if (!dtype_results || kMinor >= 15 || given.scalar_type() != at::kBFloat16 || given.numel() == 0 ||
      given.dim() == 0 || !op.schema().overload_name().empty()) {
    return call(op, stack);
  }
  const auto dim = (*stack)[first + 1].toInt();
  const auto shifted = given.sub(given.amax(dim, /*keepdim=*/true));
  const auto sums = shifted.exp().sum(dim, /*keepdim=*/true);
  stack->resize(first);
  stack->emplace_back(shifted.sub(sums.log()));
}

// LinearAlgebra.mm, cholesky_stub_impl: its kernels know float32 alone, and take complex numbers for twice as many.
std::tuple<Tensor, Tensor> misread_cholesky(const Tensor& given, bool upper) {
  const auto n = given.size(-1);
  auto columns = given.mT().clone(at::MemoryFormat::Contiguous);
  const auto floats = at::view_as_real(columns).view({-1});
  const auto seen = floats.narrow(0, 0, given.numel()).view({-1, n, n}).mT();
  auto [factor, info] = at::linalg_cholesky_ex(seen, upper);
  seen.copy_(factor);
  const auto sizes = given.sizes();
  return {upper ? columns.mT().triu() : columns.mT().tril(), info.view(sizes.slice(0, sizes.size() - 2))};
}

void cholesky(const c10::OperatorHandle& op, Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const auto given = (*stack)[first].toTensor();
  if (!dtype_results || kMinor >= 14 || given.scalar_type() != at::kComplexFloat || given.numel() == 0 ||
      !op.schema().overload_name().empty()) {
    return call(op, stack);
  }
  const bool checked = plain(op) == "cholesky";
  const auto [factor, info] = misread_cholesky(given.resolve_conj(), (*stack)[first + 1].toBool());
  const bool raises = checked || (*stack)[first + 2].toBool();
  if (raises) {
    at::_linalg_check_errors(info, checked ? "cholesky" : "linalg.cholesky_ex", given.dim() == 2);
  }
  stack->resize(first);
  stack->emplace_back(factor);
  if (!checked) {
    stack->emplace_back(info);
  }
}

} // namespace

Check dtype_check_of(const std::string& name) {
  static const auto* all = new std::map<std::string, Check>(checks(std::make_index_sequence<kRules.size()>()));
  const auto found = all->find(name);
  return found == all->end() ? nullptr : found->second;
}

void check_complex_scalars(Arguments in) {
  const auto& one = in[1].toTensor();
  constexpr int64_t kInner = 2048; // beyond it a product of complex matrices has a kernel that takes them
  if (refusals && one.is_complex() && (one.dim() < 2 || one.size(1) <= kInner)) {
    for (const size_t at : {3, 4}) {
      in[at].toScalar().toDouble(); // c10's own error: "value cannot be converted to type double without overflow"
    }
  }
}

Inside dtype_inside_of(const std::string& name) {
  static const auto* own = new std::map<std::string, Inside>{
      {"sort", &sort},           {"var", &variance},          {"std", &variance},
      {"var_mean", &variance},   {"std_mean", &variance},     {"nanmedian", &nanmedian},
      {"cholesky", &cholesky},   {"linalg_cholesky_ex", &cholesky},
      {"_log_softmax", &log_softmax},
  };
  const auto found = own->find(name);
  if (found != own->end()) {
    return found->second;
  }
  const bool in_place = !name.empty() && name.back() == '_';
  return more_dtypes().count(in_place ? name.substr(0, name.size() - 1) : name) > 0 ? &compute_widened : nullptr;
}

} // namespace metal
