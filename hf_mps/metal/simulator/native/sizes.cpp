// Kernels that are wrong for tensors, or batches, larger than they can count, and one that refuses them.
//
// Where that begins at gigabytes, Python can set a smaller number, so that a test meets the fault.
#include "device.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <c10/util/Exception.h>

#include <limits>
#include <map>

namespace metal {

SizeFaults size_faults;

namespace {

using at::Tensor;

constexpr int64_t k31 = int64_t{1} << 31;
constexpr int64_t k32 = int64_t{1} << 32;
constexpr int64_t kBatch = 1 << 16;

std::atomic<int64_t> largest_product{k32};
std::atomic<int64_t> largest_cat{k31};
std::atomic<int64_t> largest_gradient{std::numeric_limits<int32_t>::max()};

const std::map<std::string, std::atomic<int64_t>*>& limits() {
  static const std::map<std::string, std::atomic<int64_t>*> all{
      {"huge-products", &largest_product}, {"huge-cat", &largest_cat}, {"embedding-grad", &largest_gradient}};
  return all;
}

// A large input is read where its index without the upper bits points; a large output is made from inputs that are
// taken to lie in the order of their dimensions.
Tensor misread(const Tensor& matrices, bool packed, int64_t limit) {
  Tensor read = matrices;
  if (packed && !read.is_contiguous() && read.is_non_overlapping_and_dense()) {
    read = read.as_strided(read.sizes(), c10::TensorType::contiguousStridesOf(read.sizes()));
  }
  if (read.numel() > limit) {
    read = read.reshape(-1).index_select(0, at::arange(read.numel()).remainder(limit)).view(read.sizes());
  }
  return read;
}

} // namespace

// pytorch#197636. Before macOS 15 an output of that size is refused (LinearAlgebra.mm, tiled_bmm_out_mps_impl).
void huge_product(const Tensor& one, const Tensor& other, const Tensor& result, const at::Scalar& alpha) {
  const int64_t limit = largest_product;
  const bool output = result.numel() > limit;
  if (!size_faults.products || (!output && one.numel() <= limit && other.numel() <= limit)) {
    return;
  }
  TORCH_CHECK(
      !output || profile().macos_major >= 15,
      "Tiling of batch matmul for larger than 2**32 entries only available from MacOS15 onwards");
  const auto found = at::bmm(misread(one, output, limit), misread(other, output, limit));
  result.add_(found.sub_(at::bmm(one, other)), alpha);
}

// pytorch#189960: offsets wrap to negative ones, so that what lies beyond is never written.
void huge_cat(const Tensor& result) {
  const int64_t limit = largest_cat;
  if (size_faults.cat && result.numel() > limit && result.is_contiguous()) {
    result.view(-1).narrow(0, limit, result.numel() - limit).zero_();
  }
}

// Embedding.mm from torch 2.13 on, in its words.
void check_embedding_gradient(const Tensor& grad, const Tensor& indices, int64_t rows) {
  if (!size_faults.embedding || grad.dim() == 0 || indices.numel() == 0) {
    return;
  }
  const int64_t limit = largest_gradient, width = grad.size(-1);
  TORCH_CHECK(
      indices.numel() <= limit && indices.numel() * width <= limit && rows * width <= limit,
      "embedding_dense_backward_mps: tensor is larger than INT32_MAX");
}

// pytorch#96225: rows of a batch are counted in 16 bits where the gradient of a 1-D or 2-D convolution's weight is summed.
std::optional<int64_t> counted_batch(const Tensor& input) {
  const bool wraps = size_faults.batch && input.dim() == 4 && input.size(0) >= kBatch;
  return wraps ? std::optional(input.size(0) % kBatch) : std::nullopt;
}

int64_t set_limit(const std::string& name, int64_t elements) {
  const auto found = limits().find(name);
  TORCH_CHECK_VALUE(found != limits().end(), "the simulated device has no limit called ", name);
  return found->second->exchange(elements);
}

} // namespace metal
