// Bytes. Memory is unified on Apple silicon; here it is the host's, so an alias between devices costs nothing.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <limits>
#include <mutex>
#include <sstream>

namespace metal {
namespace {

// Metal's heaps hand out multiples of a page for all but the smallest buffers (MPSAllocator.h, heapBufferSizeAndAlign).
constexpr size_t kSmallest = 256;
constexpr double kDefaultRatio = 1.7; // of the recommended maximum: MPSAllocator.h, default_high_watermark_ratio
constexpr double kLargestRatio = 2.0; // MPSAllocator.h, default_high_watermark_upper_bound
// MTLDevice.maxBufferLength, of the recommended maximum: 36 GiB on a Mac of 64 (gfx-rs/wgpu#2502), 27 of 48
// (exo-explore/exo#1048), 156 where 208 are recommended (MLX's device_info of an M3 Ultra): half of a small Mac's memory.
constexpr double kLargestBuffer = 0.75;

size_t rounded(size_t bytes) {
  return (bytes + kSmallest - 1) / kSmallest * kSmallest;
}

std::string readable(size_t bytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(2);
  const double size = static_cast<double>(bytes);
  if (bytes <= 1024) {
    out << bytes << " bytes";
  } else if (bytes <= (1UL << 20)) {
    out << size / (1UL << 10) << " KiB";
  } else if (bytes <= (1UL << 30)) {
    out << size / (1UL << 20) << " MiB";
  } else {
    out << size / (1UL << 30) << " GiB";
  }
  return out.str();
}

// Counts bytes against the budget. Freed bytes stay with the driver until the cache is emptied, as on a Mac.
class Budget {
 public:
  void charge(size_t bytes) {
    // The text of MPSAllocator.mm (alloc_buffer_block), which looks before it asks for the rest.
    TORCH_CHECK(bytes < largest_buffer(), "Invalid buffer size: ", readable(bytes));
    std::lock_guard<std::mutex> lock(mutex_);
    if (limit() - std::min(limit(), current_) < bytes) {
      refuse(bytes);
    }
    current_ += bytes;
    peak_ = std::max(peak_, current_);
    driver_ = std::max(driver_, current_);
  }

  void release(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    current_ -= bytes;
  }

  MemoryFigures figures() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {current_, driver_, peak_};
  }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = current_;
  }

  void empty_cache() {
    std::lock_guard<std::mutex> lock(mutex_);
    driver_ = current_;
  }

  void set_ratio(double ratio) {
    TORCH_CHECK(ratio >= 0.0 && ratio <= kLargestRatio, "invalid high watermark ratio ", ratio);
    std::lock_guard<std::mutex> lock(mutex_);
    ratio_ = ratio;
  }

 private:
  static double initial_ratio() {
    const char* given = std::getenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO");
    const double ratio = given ? std::strtod(given, nullptr) : kDefaultRatio;
    TORCH_CHECK(ratio >= 0.0 && ratio <= kLargestRatio, "invalid high watermark ratio ", ratio);
    return ratio;
  }

  static size_t largest_buffer() {
    return static_cast<size_t>(kLargestBuffer * static_cast<double>(profile().recommended_max));
  }

  size_t limit() const {
    return ratio_ == 0.0 ? std::numeric_limits<size_t>::max()
                         : static_cast<size_t>(ratio_ * static_cast<double>(profile().recommended_max));
  }

  // The text of MPSAllocator.mm (torch 2.13, alloc_buffer_block).
  [[noreturn]] void refuse(size_t bytes) const {
    TORCH_CHECK(
        false,
        "MPS backend out of memory (MPS allocated: ",
        readable(current_),
        ", other allocations: ",
        readable(0),
        ", max allowed: ",
        readable(limit()),
        "). Tried to allocate ",
        readable(bytes),
        " on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory "
        "allocations (may cause system failure).");
    std::abort(); // not reached: TORCH_CHECK(false) throws
  }

  std::mutex mutex_;
  double ratio_ = initial_ratio();
  size_t current_ = 0;
  size_t driver_ = 0;
  size_t peak_ = 0;
};

// Never destroyed: tensors may outlive static destruction.
Budget& budget() {
  static Budget* the_budget = new Budget();
  return *the_budget;
}

// A share of the budget, given back when the memory behind it is freed.
struct Charge {
  explicit Charge(size_t size) : bytes(rounded(size)) {
    budget().charge(bytes);
  }
  ~Charge() {
    budget().release(bytes);
  }
  Charge(const Charge&) = delete;
  size_t bytes;
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

MemoryFigures memory_figures() {
  return budget().figures();
}

void reset_peak() {
  budget().reset_peak();
}

void empty_cache() {
  budget().empty_cache();
}

void set_memory_ratio(double ratio) {
  budget().set_ratio(ratio);
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

at::Tensor adopt(const at::Tensor& host) {
  check_dtype(host.scalar_type());
  TORCH_CHECK_NOT_IMPLEMENTED(host.layout() == c10::kStrided, "only strided tensors are supported on MPS");
  return device_view(host, adopt(host.storage()));
}

} // namespace metal
