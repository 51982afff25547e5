// Bytes. Memory is unified on Apple silicon; here it is the host's, so an alias between devices costs nothing. How much
// the driver counts for it is in heaps.cpp.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstring>

namespace metal {
namespace {

// Metal's heaps hand out multiples of a page for all but the smallest buffers (MPSAllocator.h, heapBufferSizeAndAlign).
constexpr size_t kSmallest = 256;

size_t rounded(size_t bytes) {
  return (bytes + kSmallest - 1) / kSmallest * kSmallest;
}

// A place in a heap, given back when the memory behind it is freed.
struct Charge {
  explicit Charge(size_t size) : bytes(rounded(size)), buffer(take_buffer(bytes)) {}
  ~Charge() {
    give_buffer(buffer, bytes);
  }
  Charge(const Charge&) = delete;
  size_t bytes;
  Buffer* buffer;
};

struct Owned {
  explicit Owned(size_t size) : charge(size), memory(c10::GetCPUAllocator()->allocate(size)) {}
  ~Owned() {
    remember_freed(memory.get(), charge.bytes);
  }
  Charge charge;
  c10::DataPtr memory;
};

struct Adopted {
  explicit Adopted(c10::Storage from) : charge(from.nbytes()), host(std::move(from)) {}
  ~Adopted() {
    remember_freed(host.data(), host.nbytes());
  }
  Charge charge;
  c10::Storage host;
};

template <typename Context>
void forget(void* context) {
  delete static_cast<Context*>(context);
}

class UnifiedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, device()};
    }
    touch_device();
    auto* owned = new Owned(bytes);
    return {owned->memory.get(), owned, &forget<Owned>, device()};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // the pointer and its context differ, so raw allocation is not offered
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

c10::DataPtr adopted_pointer(c10::Storage host) {
  if (host.nbytes() == 0) {
    return {nullptr, device()};
  }
  auto* adopted = new Adopted(std::move(host));
  return {adopted->host.mutable_data(), adopted, &forget<Adopted>, device()};
}

c10::Storage host_storage(const c10::Storage& storage, c10::DataPtr pointer) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      storage.nbytes(),
      std::move(pointer),
      c10::GetCPUAllocator(),
      /*resizable=*/true));
}

at::Tensor view_over(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKey key) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (C10_UNLIKELY(tensor.unsafeGetTensorImpl()->is_wrapped_number())) {
    impl->set_wrapped_number(true);
  }
  if (C10_UNLIKELY(tensor.is_conj())) {
    impl->_set_conj(true);
  }
  if (C10_UNLIKELY(tensor.is_neg())) {
    impl->_set_neg(true);
  }
  return view;
}

} // namespace

c10::Allocator* allocator() {
  static UnifiedMemory memory;
  return &memory;
}

void check_dtype(c10::ScalarType dtype) {
  // EmptyTensor.cpp, MPS_ERROR_DOUBLE_NOT_SUPPORTED
  TORCH_CHECK_TYPE(
      dtype != c10::ScalarType::Double,
      "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
      "Please use float32 instead.");
  // OperationUtils.mm, getMPSDataType
  TORCH_CHECK_TYPE(
      dtype != c10::ScalarType::ComplexDouble,
      "Trying to convert ",
      dtype,
      " to the MPS backend but it does not have support for that dtype.");
  TORCH_CHECK_TYPE(
      dtype != c10::ScalarType::BFloat16 || profile().macos_major >= 14,
      "MPS BFloat16 is only supported on MacOS 14 or newer");
}

c10::Storage borrow(const c10::Storage& storage) {
  settle(storage);
  return host_storage(storage, c10::DataPtr(storage.mutable_data(), c10::Device(c10::kCPU)));
}

c10::Storage host_alias(const c10::Storage& storage) {
  TORCH_CHECK(
      storage.device().is_mps(), "_host_alias_storage expects a storage on the mps device, got ", storage.device());
  auto* keep = new c10::Storage(storage);
  return host_storage(
      storage, c10::DataPtr(storage.mutable_data(), keep, &forget<c10::Storage>, c10::Device(c10::kCPU)));
}

c10::Storage adopt(c10::Storage host) {
  const size_t bytes = host.nbytes();
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, adopted_pointer(std::move(host)), allocator(), /*resizable=*/true));
}

void adopt_into(const c10::Storage& storage, c10::Storage host) {
  auto* impl = storage.unsafeGetStorageImpl();
  const size_t bytes = host.nbytes();
  impl->set_data_ptr_noswap(adopted_pointer(std::move(host)));
  impl->set_nbytes(bytes);
}

at::Tensor host_view(const at::Tensor& tensor, c10::Storage host) {
  return view_over(tensor, std::move(host), c10::DispatchKey::CPU);
}

at::Tensor device_view(const at::Tensor& host, c10::Storage storage) {
  return view_over(host, std::move(storage), c10::DispatchKey::MPS);
}

at::Tensor device_view_of(const at::Tensor& base, const at::Tensor& host) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), host.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  return view;
}

at::Tensor adopt(const at::Tensor& host) {
  check_dtype(host.scalar_type());
  TORCH_CHECK_NOT_IMPLEMENTED(host.layout() == c10::kStrided, "only strided tensors are supported on MPS");
  return device_view(host, adopt(host.storage()));
}

} // namespace metal
