// What Metal's kernels make of dtypes: dtypes.cpp.
#pragma once

#include "device.h"

#include <torch/version.h>

namespace metal {

constexpr int kMinor = TORCH_VERSION_MAJOR == 2 ? TORCH_VERSION_MINOR : 99;

extern std::atomic<bool> dtype_results; // results that differ from the CPU's, for a known reason
// The check of the operator called `name`, without its overload, for the dtypes that Metal refuses, or null.
Check dtype_check_of(const std::string& name);
// Raises where addmm or addr would need a complex `beta` or `alpha`, which MPSGraph's constants cannot be.
void check_complex_scalars(c10::ArrayRef<c10::IValue> in);
// Runs an operator on the CPU as Metal would, or null.
Inside dtype_inside_of(const std::string& name);

} // namespace metal
