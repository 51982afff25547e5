// Copies that nobody waits for, done as late as the device may come to them.
//
// With non_blocking=True Copy.mm puts a copy into the queue and returns. The device reads a host source when it gets
// there: what the program has written meanwhile is what arrives, and before torch 2.13 nothing keeps the source alive
// (pytorch#189690, #181017). A copy to the host is there when somebody has waited. Operators are computed at once here, so
// a copy to the device is done just before the first of them that touches it, and at the latest when somebody waits.
#include "device.h"

#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CPUAllocator.h>

#include <functional>
#include <mutex>

namespace metal {

std::atomic<bool> late_copies{false};
std::atomic<bool> freed_sources{false};

namespace {

using at::Tensor;

struct Copy {
  const c10::StorageImpl* to; // of the device; null for a copy to the host
  const c10::StorageImpl* host;
  std::function<void()> run;
};

// Jobs run under the lock, so that no other thread reads what they are about to write. Nobody frees the list: programs end
// with copies in it.
std::recursive_mutex copies_lock;
std::vector<Copy>& copies = *new std::vector<Copy>(); // in order
std::atomic<size_t> queued{0};

void run(const std::function<bool(const Copy&)>& meant) {
  std::vector<Copy> now; // freed outside the lock: what they hold may be Python's, which has a lock of its own
  const std::lock_guard<std::recursive_mutex> guard(copies_lock);
  std::vector<Copy> left;
  for (auto& copy : copies) {
    (meant(copy) ? now : left).push_back(std::move(copy));
  }
  copies = std::move(left);
  for (const auto& copy : now) {
    copy.run();
  }
  queued = copies.size();
}

void add(Copy copy) {
  const std::lock_guard<std::recursive_mutex> guard(copies_lock);
  copies.push_back(std::move(copy));
  queued = copies.size();
}

// A host tensor whose memory others may free.
class Loose {
 public:
  explicit Loose(const Tensor& tensor)
      : storage_(tensor.storage().getWeakStorageImpl()),
        data_(tensor.storage().data()),
        shape_(host_view(tensor, c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::GetCPUAllocator(), false))) {}

  // Undefined where the memory is gone. Holds it from here on.
  Tensor lock() {
    auto there = storage_.lock();
    if (!there) {
      return {};
    }
    held_ = c10::Storage(std::move(there));
    return held_.data() == data_ ? host_view(shape_, held_) : Tensor();
  }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const void* data_;
  Tensor shape_;
  c10::Storage held_;
};

void assign(Tensor to, const Tensor& from) {
  at::native::copy_(to, from, /*non_blocking=*/false);
}

} // namespace

// Copy.mm, copy_to_mps_: a source of another dtype, or one with holes, is made anew on the host first; the copy reads
// that, which lives no longer than the call where nothing holds it.
void copy_in_later(const Tensor& to, const Tensor& from) {
  const auto* target = to.storage().unsafeGetStorageImpl();
  settle(to.storage());
  const bool anew = from.scalar_type() != to.scalar_type() || from.sizes() != to.sizes() ||
      !from.is_non_overlapping_and_dense();
  const auto source = host_view(from, from.storage());
  run([&](const Copy& copy) { return copy.host == source.storage().unsafeGetStorageImpl(); });
  const auto there = device_view(to, to.storage());
  if (anew && !freed_sources) {
    return assign(host_view(there), source);
  }
  if (!freed_sources) {
    return add({target, nullptr, [there, source] { assign(host_view(there), source); }});
  }
  add({target, nullptr, [there, loose = Loose(anew ? source.clone() : source)]() mutable {
         if (const auto found = loose.lock(); found.defined()) {
           assign(host_view(there), found);
         } else {
           host_view(there).zero_(); // whatever lies there by now
         }
       }});
}

// Copy.mm, copy_from_mps_: into a tensor that lies otherwise, the copy goes through memory of its own, which is copied on
// before anything has arrived in it.
void copy_out_later(const Tensor& to, const Tensor& from) {
  auto arrived = at::empty_like(to);
  assign(arrived, host_view(from));
  to.zero_(); // what lies in fresh memory
  if (to.strides() != from.strides() || to.sizes() != from.sizes() || !from.is_non_overlapping_and_dense()) {
    return;
  }
  add({nullptr, to.storage().unsafeGetStorageImpl(), [arrived, loose = Loose(to)]() mutable {
         if (const auto found = loose.lock(); found.defined()) {
           assign(found, arrived);
         }
       }});
}

void settle(const c10::Storage& storage) {
  if (queued.load(std::memory_order_relaxed) == 0) {
    return;
  }
  const auto* touched = storage.unsafeGetStorageImpl();
  run([touched](const Copy& copy) { return copy.to == touched; });
}

void finish() {
  if (queued.load(std::memory_order_relaxed) != 0) {
    run([](const Copy&) { return true; });
  }
}

} // namespace metal
