// What Metal does not compute: the errors that PyTorch's Metal kernels raise, and the assertions of Apple's libraries
// that end the process. Either comes before anything is computed, so a call that is refused has written nothing.
#include "dtypes.h"

#include <ATen/ExpandUtils.h>
#include <c10/util/Exception.h>

#include <torch/version.h>

#include <cstdlib>
#include <iostream>
#include <limits>
#include <map>
#include <vector>

namespace metal {

std::atomic<bool> refusals{false};
Aborts aborts;

namespace {

using at::Tensor;
using c10::IntArrayRef;

constexpr int64_t kIntMax = std::numeric_limits<int32_t>::max();
constexpr int64_t kElements = int64_t(1) << 32;

bool macos_at_least(int major, int minor) {
  return std::pair(profile().macos_major, profile().macos_minor) >= std::pair(major, minor);
}

Tensor tensor(Arguments in, size_t index) {
  return in.size() > index && in[index].isTensor() ? in[index].toTensor() : Tensor();
}

// As Apple's assertions end a process: some lines on stderr and SIGABRT, which no Python catches.
[[noreturn]] void end(const std::string& error, const char* assertion) {
  if (!error.empty()) {
    std::cerr << "(mpsFileLoc): MPSGraphUtilities.mm:233:0: error: " << error << "\n";
  }
  std::cerr << assertion << std::endl;
  std::abort();
}

constexpr const char* kVerification = "MPSGraphExecutable.mm:1484: failed assertion `original module failed verification'";
constexpr const char* kElementTypes = " op requires the same element type for all operands and results";

// ---- errors ----

// AdaptivePooling.mm, set_kernel_params; #96056. Max pooling asks for the first alone.
void adaptive_pool(IntArrayRef input, IntArrayRef output, bool average) {
  if (!refusals || input.size() < 2 || output.empty()) {
    return;
  }
  const auto high = input[input.size() - 2], wide = input.back();
  const auto out_high = output[output.size() - 2], out_wide = output.back();
  TORCH_CHECK_NOT_IMPLEMENTED(
      (high >= out_high && wide >= out_wide) || (high <= out_high && wide <= out_wide),
      "Adaptive pool MPS: Input height and width must both be greater than, or equal to, or lesser than output height "
      "and width");
  const bool smaller = high >= out_high;
  if (!average || (smaller ? out_high : high) == 0 || (smaller ? out_wide : wide) == 0) {
    return;
  }
  const bool divisible =
      smaller ? high % out_high == 0 && wide % out_wide == 0 : out_high % high == 0 && out_wide % wide == 0;
  TORCH_CHECK_NOT_IMPLEMENTED(
      divisible,
      "Adaptive pool MPS: ", smaller ? "input" : "output", " sizes must be divisible by ", smaller ? "output" : "input",
      " sizes. Non-divisible input sizes are not implemented on MPS device yet. For now, you can manually transfer "
      "tensor to cpu in this case. Please refer to [this issue](https://github.com/pytorch/pytorch/issues/96056)");
}

void average_pool(Arguments in) {
  const auto size = in[1].toIntVector();
  adaptive_pool(in[0].toTensor().sizes(), size, true);
}

void average_pool_backward(Arguments in) {
  adaptive_pool(in[1].toTensor().sizes(), in[0].toTensor().sizes(), true);
}

void max_pool(Arguments in) {
  const auto size = in[1].toIntVector();
  adaptive_pool(in[0].toTensor().sizes(), size, false);
}

// OperationUtils.mm, Placeholder: a tensor that does not fill its storage in order is given to MPSGraph as that storage.
void graph_operand(const Tensor& given) {
  if (!refusals || !given.defined()) {
    return;
  }
  constexpr const char* text = "MPSGraph does not support tensor dims larger than INT_MAX";
  for (const auto size : given.sizes()) {
    TORCH_CHECK(size <= kIntMax, text);
  }
  if (macos_at_least(15, 0) && (!given.is_contiguous() || given.storage_offset() != 0)) {
    const auto behind = static_cast<int64_t>(given.storage().nbytes() / given.itemsize()) - given.storage_offset();
    TORCH_CHECK(behind <= kIntMax, text);
  }
}

// LinearAlgebra.mm, of each of the four products.
void product(const Tensor& one, const Tensor& other) {
  if (!refusals || one.dim() < 2 || one.dim() != other.dim()) {
    return;
  }
  for (const auto size : {one.dim() > 2 ? one.size(0) : 0, one.size(-2), other.size(-1)}) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        size <= kElements, "Output dim sizes larger than 2**32 elements for matmul not supported on MPS device.");
  }
  graph_operand(one);
  graph_operand(other);
}

void first_product(Arguments in) {
  product(in[0].toTensor(), in[1].toTensor());
}

void second_product(Arguments in) {
  product(in[1].toTensor(), in[2].toTensor());
}

void biased_product(Arguments in) {
  second_product(in);
  check_complex_scalars(in);
}

// Indexing.mm; torch 2.14 counts in 64 bits.
void nonzero(Arguments in) {
  if (refusals && kMinor < 14) {
    TORCH_CHECK(
        in[0].toTensor().numel() < kIntMax,
        "nonzero is not supported for tensors with more than INT_MAX elements, See https://github.com/pytorch/pytorch/issues/51871");
  }
}

void masked_fill(Arguments in) {
  if (refusals) {
    TORCH_CHECK(
        in[0].toTensor().numel() <= kElements - 1, "masked_fill not supported for tensors of more than 2**32 elements");
  }
}

// Pad.mm: no refusal, but another way and a warning.
void constant_pad(Arguments in) {
  if (refusals && in[1].toIntVector().size() > 6) {
    TORCH_WARN_ONCE(
        "MPS: The constant padding of more than 3 dimensions is not currently supported natively. It uses View Ops "
        "default implementation to run. This may have performance implications.");
  }
}

// ---- aborts ----

// pytorch#190054: the graph of the backward pass multiplies half-precision inputs by float32 weights.
void layer_norm_backward(Arguments in) {
  const auto input = tensor(in, 1), weight = tensor(in, 5);
  if (aborts.layer_norm && weight.defined() && weight.scalar_type() != input.scalar_type()) {
    end(c10::str("'mps.multiply'", kElementTypes), kVerification);
  }
}

bool computes(const Tensor& tensor) { // supportedFloatingOrComplexType of OperationUtils.h
  const auto dtype = tensor.scalar_type();
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kComplexFloat ||
      dtype == at::kComplexHalf;
}

// LinearAlgebra.mm, addr_out_mps
void outer_product(Arguments in) {
  TORCH_CHECK(!refusals || computes(in[1].toTensor()), "MPS device does not support addr for non-float input");
  check_complex_scalars(in);
}

void operand(const Tensor& tensor, const char* name, const char* plural) {
  TORCH_CHECK(computes(tensor), "MPS device does not support linear for non-float ", plural);
  TORCH_CHECK(tensor.is_mps(), "Tensor for argument ", name, " is on ", tensor.device(), " but expected on mps");
}

// Linear.mm
void linear_operands(const Tensor& rows, const Tensor& weight, const Tensor& bias) {
  operand(rows, "input", "inputs");
  operand(weight, "weight", "weights");
  if (bias.defined()) {
    operand(bias, "bias", "bias");
  }
  TORCH_CHECK(
      rows.size(-1) == weight.size(-1),
      "linear(): input and weight.T shapes cannot be multiplied (",
      rows.size(-2), "x", rows.size(-1), " and ", weight.size(-1), "x", weight.size(-2), ")");
}

// pytorch#190050: no features to sum over, and a result all the same.
void linear(Arguments in) {
  const auto rows = tensor(in, 0), weight = tensor(in, 1);
  if (refusals) {
    linear_operands(rows, weight, tensor(in, 2));
  }
  if (aborts.linear_empty && rows.dim() > 0 && rows.size(-1) == 0 && weight.dim() == 2 && weight.size(0) > 0) {
    for (int64_t dim = 0; dim + 1 < rows.dim(); ++dim) {
      if (rows.size(dim) == 0) {
        return;
      }
    }
    end("",
        "MPSNDArray.mm:759: failed assertion `[MPSNDArray initWithDevice:descriptor:isTextureBacked:] Error: device "
        "may not be nil'");
  }
}

} // namespace

Check check_of(const std::string& name) {
  static const std::map<std::string, Check> checks{
      {"_adaptive_avg_pool2d", &average_pool},
      {"adaptive_avg_pool2d", &average_pool},
      {"_adaptive_avg_pool2d_backward", &average_pool_backward},
      {"adaptive_max_pool2d", &max_pool},
      {"mm", &first_product},
      {"bmm", &first_product},
      {"addmm", &biased_product},
      {"addmm_", &biased_product},
      {"addr", &outer_product},
      {"addr_", &outer_product},
      {"baddbmm", &second_product},
      {"baddbmm_", &second_product},
      {"nonzero", &nonzero},
      {"masked_fill", &masked_fill},
      {"masked_fill_", &masked_fill},
      {"constant_pad_nd", &constant_pad},
      {"native_layer_norm_backward", &layer_norm_backward},
      {"linear", &linear},
  };
  const auto found = checks.find(name);
  return found == checks.end() ? dtype_check_of(name) : found->second;
}

void check_linear_backward(const Tensor& self, const Tensor& grad_output, const Tensor& weight) {
  if (refusals) {
    TORCH_CHECK(computes(weight), "mps_linear_backward: unsupported weights data type: ", weight.scalar_type());
    TORCH_CHECK(computes(grad_output), "MPS device does not support linear backward for non-float inputs");
  }
  // pytorch#187988
  if (aborts.linear_vector && weight.dim() == 1) {
    end(c10::str("'mps.matmul' op contracting dimensions differ ", self.numel() / std::max<int64_t>(self.size(-1), 1),
                 " & ", weight.size(0)),
        kVerification);
  }
  // pytorch#187201: more than four dimensions, two of them of size 1
  if (aborts.linear_deep && self.dim() > 4) {
    int64_t single = 0;
    for (const auto size : self.sizes()) {
      single += size == 1 ? 1 : 0;
    }
    if (single > 1) {
      end("", "MPSGraphExecutable.mm:6125: failed assertion `Error: MLIR pass manager failed'");
    }
  }
}

void check_convolution(const Tensor& self, const Tensor& weight, IntArrayRef wide) {
  if (!refusals) {
    return;
  }
  TORCH_CHECK(at::isFloatingType(self.scalar_type()), "Convolution is supported only for Floating types");
  graph_operand(self);
  graph_operand(weight);
  for (const auto size : wide) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        size <= (1 << 16) || macos_at_least(15, 1), "Output channels > 65536 not supported at the MPS device. ");
  }
}

void check_convolution_transpose(const Tensor& self) {
  TORCH_CHECK(
      !refusals || self.dim() != 5 || !at::isReducedFloatingType(self.scalar_type()),
      "ConvTranspose 3D with BF16 or FP16 types is not supported on MPS");
}

} // namespace metal
