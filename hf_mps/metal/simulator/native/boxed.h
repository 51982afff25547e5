// What kernels of any operator do with it: its arguments, and then its results, are on a stack.
#pragma once

#include "device.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace metal {

// The operator on the CPU, whose arguments and results are host tensors.
inline void call(const Operator& op, Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

inline c10::IValue& argument(const Operator& op, Stack* stack, size_t index) {
  return (*stack)[stack->size() - op.schema().arguments().size() + index];
}

} // namespace metal
