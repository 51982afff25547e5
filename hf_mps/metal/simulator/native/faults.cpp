// Wrong results that some Macs give without an error, each after an upstream issue; Python says which are on.
#include "dtypes.h"
#include "misread.h"
#include "products.h"
#include "queue.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <map>

namespace metal {

namespace {

using at::Tensor;

std::atomic<bool> cuda_graphs{false}; // a fault of compiled code: hf_mps/metal/simulator/compiled.py has it
std::atomic<bool> large_k{false};
std::atomic<bool> large_k_batched{false};
std::atomic<bool> row_bias{false};
std::atomic<bool> many_rows_bias{false};
std::atomic<bool> dtype_copies{false};
std::atomic<bool> wide_copies{false};

const std::map<std::string, std::atomic<bool>*>& switches() {
  static const auto* all = new std::map<std::string, std::atomic<bool>*>{
      {"permuted-activations", &permuted_activations},
      {"permuted-results", &permuted_results},
      {"permuted-batch-norm", &permuted_batch_norm},
      {"large-k", &large_k},
      {"large-k-batched", &large_k_batched},
      {"sliced-products", &product_faults.sliced},
      {"gapped-products", &product_faults.gapped},
      {"sliced-baddbmm", &product_faults.sliced_baddbmm},
      {"gapped-baddbmm", &product_faults.gapped_baddbmm},
      {"expanded-operands", &product_faults.expanded},
      {"expanded-mm", &product_faults.expanded_mm},
      {"expanded-gradient", &product_faults.expanded_gradient},
      {"row-bias", &row_bias},
      {"many-rows-bias", &many_rows_bias},
      {"dtype-copies", &dtype_copies},
      {"wide-copies", &wide_copies},
      {"dtype-results", &dtype_results},
      {"late-copies", &late_copies},
      {"queued-work", &queued_work},
      {"stopped-gpu", &stopped_gpu},
      {"conv3d-layout", &conv3d_layout},
      {"large-pad", &misreads.large_pad},
      {"lerp-weight", &misreads.lerp_weight},
      {"lone-scans", &misreads.lone_scans},
      {"scalar-views", &misreads.scalar_views},
      {"index-add-gaps", &misreads.index_add_gaps},
      {"conv-batch", &size_faults.batch},
      {"huge-products", &size_faults.products},
      {"huge-cat", &size_faults.cat},
      {"embedding-grad", &size_faults.embedding},
      {"silent-indices", &silent_indices},
      {"late-indices", &late_indices},
      {"atomic-order", &atomic_order},
      {"lstm-dropout", &lstm_dropout},
      {"cuda-graphs", &cuda_graphs},
      {"heaps", &heaps_counted},
      {"whole-buffers", &whole_buffers},
      {"refusals", &refusals},
      {"mixed-layer-norm", &mixed_layer_norm},
      {"mixed-norm-backward", &aborts.layer_norm},
      {"vector-weight", &aborts.linear_vector},
      {"deep-linear", &aborts.linear_deep},
      {"empty-linear", &aborts.linear_empty},
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
  huge_product(in[0].toTensor(), in[1].toTensor(), result, 1);
}

void baddbmm(Arguments in, const Tensor& result) {
  product(result, in[1].toTensor(), in[2].toTensor(), true);
  huge_product(in[1].toTensor(), in[2].toTensor(), result, in[4].toScalar());
}

void cat(Arguments, const Tensor& result) {
  huge_cat(result);
}

// pytorch#188438: the kernel that multiplies and adds at once forgets the bias where a matrix has one row. #189495: it
// counts matrices in 16 bits, so that those from 65,536 on are written over the first ones.
constexpr int64_t kMatrices = 1 << 16;

void biased_linear(const Tensor& rows, const Tensor& weight, const Tensor& result) {
  if (!rows.is_contiguous() || !weight.is_contiguous() || rows.dim() == 0 || weight.dim() != 2) {
    return; // MPSGraph's way, which is right
  }
  if (row_bias && (rows.dim() == 1 || rows.size(-2) == 1)) {
    result.copy_(rows.matmul(weight.t()));
  }
  const int64_t beyond = rows.dim() > 2 ? rows.size(-3) - kMatrices : 0;
  if (many_rows_bias && beyond > 0) {
    const auto late = result.narrow(-3, kMatrices, beyond);
    const auto first = std::min(beyond, kMatrices);
    result.narrow(-3, 0, first).copy_(late.narrow(-3, 0, first));
    late.fill_(stale.load());
  }
}

void linear(Arguments in, const Tensor& result) {
  const auto& weight = in[1].toTensor();
  if (weight.dim() == 2) {
    const auto rows = result.numel() / std::max<int64_t>(weight.size(0), 1);
    sum_too_far(result, rows, weight.size(0), weight.size(1), large_k);
  }
  if (in.size() > 2 && in[2].isTensor() && in[2].toTensor().defined()) {
    biased_linear(in[0].toTensor(), weight, result);
  }
}

} // namespace

Fault fault_of(const std::string& name) {
  static const std::map<std::string, Fault> faults{
      {"mm", &mm}, {"addmm", &addmm}, {"addmm_", &addmm}, {"bmm", &bmm},
      {"baddbmm", &baddbmm}, {"baddbmm_", &baddbmm}, {"linear", &linear}, {"cat", &cat},
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

// pytorch#189563, #194344: such a copy first converts into a buffer of its own or, where the elements do not grow, into
// the source's, and then reads that buffer as far in as the view lies in its storage. Only a page without an offset is
// written at once. #197715: torch 2.14.0 writes nothing where Metal has no such dtype.
constexpr uintptr_t kPage = 16384;

bool faulty_copy(const Tensor& to, const Tensor& from) {
  if (to.scalar_type() == from.scalar_type() || from.numel() == 0) {
    return false;
  }
  const bool wide = to.scalar_type() == at::kDouble || to.scalar_type() == at::kComplexDouble;
  if (wide && wide_copies) {
    return true;
  }
  if (!dtype_copies) {
    return false;
  }
  check_dtype(to.scalar_type());
  const bool direct = to.strides() == from.strides() && to.sizes() == from.sizes() &&
      from.is_non_overlapping_and_dense() && !from.is_conj() && !from.is_neg() && !to.is_conj() && !to.is_neg();
  auto* target = static_cast<char*>(to.data_ptr());
  const size_t offset = from.storage_offset() * from.itemsize();
  if (!direct || (reinterpret_cast<uintptr_t>(target) % kPage == 0 && offset == 0)) {
    return false;
  }
  const auto converted = host_view(from).to(to.scalar_type());
  const size_t bytes = converted.nbytes();
  const auto* read = static_cast<const char*>(converted.const_data_ptr());
  size_t readable = bytes;
  if (to.itemsize() <= from.itemsize()) {
    auto* source = static_cast<char*>(from.storage().mutable_data());
    std::memcpy(source, read, bytes);
    read = source;
    readable = from.storage().nbytes();
  }
  std::memset(target, 0, bytes);
  if (offset < readable) {
    std::memcpy(target, read + offset, std::min(bytes, readable - offset));
  }
  return true;
}

int64_t take_longest_sum() {
  return longest.exchange(0);
}

void switch_fault(const std::string& name, bool on) {
  const auto found = switches().find(name);
  TORCH_CHECK_VALUE(found != switches().end(), "the simulated device has no fault called ", name);
  finish(); // what is queued is done as the faults were when it came
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
