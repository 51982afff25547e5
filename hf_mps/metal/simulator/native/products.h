// Matrix products that MPSGraph writes beside their place, or computes from operands whose stride is 0.
#pragma once

#include "device.h"

namespace metal {

struct ProductFaults {
  std::atomic<bool> sliced{false}; // a result that has an offset or gaps is never written
  std::atomic<bool> gapped{false}; // a result that has gaps is written as if it had none
  std::atomic<bool> sliced_baddbmm{false}; // the same two of baddbmm, which the first two leave alone
  std::atomic<bool> gapped_baddbmm{false};
  std::atomic<bool> expanded{false}; // addmm computes every 16th row from an operand of stride 0
  std::atomic<bool> expanded_mm{false}; // mm does so too
  std::atomic<bool> expanded_gradient{false}; // and the gradient of a linear layer's input
};

extern ProductFaults product_faults;
Inside product_inside_of(const std::string& name);
Inside unwritten_inside_of(const std::string& name); // permuted.cpp
extern std::atomic<bool> permuted_batch_norm, permuted_results; // permuted.cpp
// The gradient of a linear layer's input, on the host, as the faults that are on make it.
void misread_gradient(const at::Tensor& grad_output, const at::Tensor& of_input);

} // namespace metal
