// Operators without a Metal kernel: Metal's error, or the CPU where PYTORCH_ENABLE_MPS_FALLBACK says so, as
// aten/src/ATen/mps/MPSFallback.mm has it (torch 2.13). The variable is read once, when the device is loaded.
#include "device.h"

#include <ATen/native/CPUFallback.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdlib>

namespace metal {
namespace {

std::string the_commit;

void to_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_WARN_ONCE(
      "The operator '",
      op.schema().operator_name(),
      "' is not currently supported on the MPS backend and will fall back to run on the CPU.",
      " This may have performance implications.");
  at::native::cpu_fallback(op, stack);
}

void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "The operator '",
      op.schema().operator_name(),
      "' is not currently implemented for the MPS device. If you want this op to be considered for addition "
      "please comment on https://github.com/pytorch/pytorch/issues/141287 and mention use-case, that resulted "
      "in missing op as well as commit hash ",
      the_commit,
      ". As a temporary fix, you can set the environment variable `PYTORCH_ENABLE_MPS_FALLBACK=1` to use the "
      "CPU as a fallback for this op. WARNING: this will be slower than running natively on MPS.");
}

at::Tensor refuse_mixed_devices(
    const at::Tensor& self,
    const at::Tensor& weight,
    c10::IntArrayRef,
    const std::optional<at::Tensor>&,
    c10::IntArrayRef,
    c10::IntArrayRef) {
  TORCH_CHECK(
      self.device() == weight.device(),
      "slow_conv2d_forward_mps: input(device='",
      self.device(),
      "') and weight(device=",
      weight.device(),
      "')  must be on the same device");
  TORCH_INTERNAL_ASSERT(false, "slow_conv2d_forward_mps should not be called for both tensors on MPS device");
}

bool enabled() {
  const char* given = std::getenv("PYTORCH_ENABLE_MPS_FALLBACK");
  return given != nullptr && std::stoi(given) != 0;
}

} // namespace

void register_fallback(const std::string& commit, const std::vector<std::string>& always_on_cpu) {
  the_commit = commit;
  static torch::Library all(torch::Library::IMPL, "_", c10::DispatchKey::MPS, __FILE__, __LINE__);
  all.fallback(
      enabled() ? torch::CppFunction::makeFromBoxedFunction<&to_cpu>()
                : torch::CppFunction::makeFromBoxedFunction<&refuse>());
  // The dispatcher's own word for where a kernel comes from, by which one of these is told from a Metal kernel.
  static torch::Library aten(
      torch::Library::IMPL, "aten", c10::DispatchKey::MPS, "aten/src/ATen/mps/MPSFallback.mm", __LINE__);
  for (const auto& name : always_on_cpu) {
    if (name == "aten::_slow_conv2d_forward") {
      aten.impl(name.c_str(), &refuse_mixed_devices);
    } else {
      aten.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&to_cpu>());
    }
  }
}

} // namespace metal
