// Wrong results that some Macs give without an error, each after an upstream issue; Python says which are on.
#include "device.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <map>

namespace metal {
namespace {

using at::Tensor;
using Arguments = c10::ArrayRef<c10::IValue>;

std::atomic<bool> large_k{false};
std::atomic<bool> large_k_batched{false};

const std::map<std::string, std::atomic<bool>*>& switches() {
  static const auto* all = new std::map<std::string, std::atomic<bool>*>{
      {"large-k", &large_k},
      {"large-k-batched", &large_k_batched},
  };
  return *all;
}

// What a kernel finds that reads behind its operands: memory that was freed last.
std::atomic<float> stale{0.0F};
constexpr size_t kRemembered = 1 << 16; // bytes; smaller buffers lie elsewhere

// pytorch#183535: the last tile of a long sum is not clipped, so what lies behind the operands is summed too.
constexpr int64_t kLongest = 32766; // pytorch#195163: 32767 is wrong by one term
constexpr int64_t kSide = 16;
constexpr int64_t kTile = 128; // multiples of it (a vocabulary of 151,936) do not read too far, 32,784 does

std::atomic<int64_t> longest{0};

void sum_too_far(const Tensor& result, int64_t rows, int64_t columns, int64_t k, bool wrong) {
  if (rows < kSide || columns < kSide || !at::isFloatingType(result.scalar_type())) {
    return;
  }
  if (k > longest) {
    longest = k;
  }
  const int64_t beyond = (kTile - k % kTile) % kTile;
  if (wrong && k > kLongest && beyond > 0) {
    const float behind = stale;
    result.add_(behind * behind * static_cast<float>(beyond));
  }
}

void product(const Tensor& result, const Tensor& one, const Tensor& other, bool batched) {
  sum_too_far(result, one.size(-2), other.size(-1), one.size(-1), batched ? large_k_batched : large_k);
}

void mm(Arguments in, const Tensor& result) {
  product(result, in[0].toTensor(), in[1].toTensor(), false);
}

void addmm(Arguments in, const Tensor& result) {
  product(result, in[1].toTensor(), in[2].toTensor(), false);
}

void bmm(Arguments in, const Tensor& result) {
  product(result, in[0].toTensor(), in[1].toTensor(), true);
}

void baddbmm(Arguments in, const Tensor& result) {
  product(result, in[1].toTensor(), in[2].toTensor(), true);
}

void linear(Arguments in, const Tensor& result) {
  const auto& weight = in[1].toTensor();
  if (weight.dim() == 2) {
    const auto rows = result.numel() / std::max<int64_t>(weight.size(0), 1);
    sum_too_far(result, rows, weight.size(0), weight.size(1), large_k);
  }
}

} // namespace

Fault fault_of(const std::string& name) {
  static const std::map<std::string, Fault> faults{
      {"mm", &mm}, {"addmm", &addmm}, {"addmm_", &addmm}, {"bmm", &bmm},
      {"baddbmm", &baddbmm}, {"baddbmm_", &baddbmm}, {"linear", &linear},
  };
  const auto found = faults.find(name);
  return found == faults.end() ? nullptr : found->second;
}

void linear_backward_faults(
    const Tensor& rows, const Tensor& grad, const Tensor& of_input, const Tensor& of_weight) {
  if (of_input.defined()) {
    sum_too_far(of_input, grad.size(0), rows.size(1), grad.size(1), large_k);
  }
  if (of_weight.defined()) {
    sum_too_far(of_weight, grad.size(1), rows.size(1), grad.size(0), large_k);
  }
}

int64_t take_longest_sum() {
  return longest.exchange(0);
}

void switch_fault(const std::string& name, bool on) {
  const auto found = switches().find(name);
  TORCH_CHECK_VALUE(found != switches().end(), "the simulated device has no fault called ", name);
  *found->second = on;
}

std::vector<std::string> faults_on() {
  std::vector<std::string> names;
  for (const auto& [name, on] : switches()) {
    if (*on) {
      names.push_back(name);
    }
  }
  return names;
}

void remember_freed(const void* memory, size_t bytes) {
  if (memory != nullptr && bytes >= kRemembered) {
    float first = 0.0F;
    std::memcpy(&first, memory, sizeof(first));
    stale = std::isfinite(first) ? first : 0.0F;
  }
}

} // namespace metal
