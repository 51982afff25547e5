// Operators that cannot be run by the host kernel: factories, storage, views that are called often, and dropout.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Utils.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_embedding_bag_backward_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace metal {
namespace {

using at::Tensor;
constexpr c10::DispatchKeySet kMetal(c10::DispatchKey::MPS);

void check_layout(std::optional<c10::Layout> layout) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      at::layout_or_default(layout) == c10::kStrided, "only strided tensors are supported on MPS");
}

Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device>,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  check_layout(layout);
  TORCH_CHECK(size.size() <= 16, "MPS supports tensors with dimensions <= 16, but got ", size.size(), ".");
  const auto type = at::dtype_or_default(dtype);
  check_dtype(type);
  return Tensor(at::detail::empty_generic(size, allocator(), kMetal, type, format));
}

Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device>,
    std::optional<bool>) {
  check_layout(layout);
  const auto type = at::dtype_or_default(dtype);
  check_dtype(type);
  return Tensor(at::detail::empty_strided_generic(size, stride, allocator(), kMetal, type));
}

// A tensor of zeros that takes no memory: what autograd makes for gradients that nobody needs.
Tensor efficient_zeros(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>) {
  static at::native::ZeroTensorAllocator zeros(device());
  const auto type = at::dtype_or_default(dtype);
  check_dtype(type);
  auto tensor = Tensor(at::detail::empty_generic(
      size, &zeros, kMetal | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor), type, std::nullopt));
  return tensor;
}

Tensor& set_storage_at(
    Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}

Tensor& set_storage(Tensor& self, c10::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage_at(self, std::move(storage), 0, {elements}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}

Tensor& set_empty(Tensor& self) {
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, allocator(), /*resizable=*/true);
  return set_storage_at(self, std::move(nothing), 0, {0}, {});
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  settle(self.storage()); // what has room no longer is moved
  return at::native::resize_(self, size, format);
}

Tensor as_strided(
    const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor view(const Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}

Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  return const_cast<Tensor&>(to).copy_(self, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return const_cast<Tensor&>(to).copy_(self);
}

// The CPU's native_dropout draws from the CPU's generator; this one draws from the device's.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0) {
    return {input, at::empty_like(input)};
  }
  const OneLaunch one("aten::native_dropout", {input, p, train});
  auto mask = at::empty_like(input, input.options().dtype(c10::kBool));
  if (!train.value_or(true)) {
    return {input.clone(), mask.fill_(true)};
  }
  const double keep = 1.0 - p;
  mask.bernoulli_(keep);
  return {input.mul(mask).mul_(keep == 0.0 ? 0.0 : 1.0 / keep), mask};
}

// PyTorch's own, above whose devices it stands: it calls the dense or the sparse backward pass of this device.
Tensor embedding_bag_backward(
    const Tensor& grad,
    const Tensor& indices,
    const Tensor& offsets,
    const Tensor& offset2bag,
    const Tensor& bag_size,
    const Tensor& largest,
    c10::SymInt rows,
    bool by_frequency,
    int64_t mode,
    bool sparse,
    const std::optional<Tensor>& weights,
    int64_t padding) {
  const OneLaunch one("aten::_embedding_bag_backward", {grad, indices});
  return at::native::_embedding_bag_backward_symint(
      grad, indices, offsets, offset2bag, bag_size, largest, rows, by_frequency, mode, sparse, weights, padding);
}

} // namespace

void register_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::MPS, __FILE__, __LINE__);
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_efficientzerotensor", &efficient_zeros);
  library.impl("set_", &set_empty);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage_at);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("resize_", &resize);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("native_dropout", &native_dropout);
  library.impl("_embedding_bag_backward", &embedding_bag_backward);
}

} // namespace metal
