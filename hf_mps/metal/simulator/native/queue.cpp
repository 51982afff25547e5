// Copies that nobody waits for, done as late as the device may come to them.
//
// With non_blocking=True Copy.mm puts a copy into the queue and returns. The device reads a host source when it gets
// there: what the program has written meanwhile is what arrives (pytorch#189690). A copy to the host is there when
// somebody has waited. Operators are computed at once here, so a copy to the device is done just before the first of
// them that touches it, and at the latest when somebody waits; with queued_work they are in the same queue
// (deferred.cpp).
#include "queue.h"

#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CPUAllocator.h>

#include <unistd.h>

#include <exception>
#include <mutex>

namespace metal {

std::atomic<bool> late_copies{false};
std::atomic<bool> queued_work{false};
std::atomic<bool> stopped_gpu{false};
thread_local int Unread::depth = 0;

namespace {

using at::Tensor;

struct Job {
  const c10::StorageImpl* to; // of the device, of a copy to it
  const c10::StorageImpl* host; // of a copy to the host
  std::function<void()> run;
};

// A Mac hands its queue over from time to time and goes on; here the oldest work of a long queue is done.
constexpr size_t kLongestQueue = 4096;

// Jobs run under the lock, so that no other thread reads what they are about to write. Nobody frees the list: programs
// end with jobs in it.
std::recursive_mutex jobs_lock;
std::vector<Job>& jobs = *new std::vector<Job>(); // in order
std::atomic<size_t> queued{0};
std::atomic<int64_t> waits_left{1}; // until the GPU stops, where that fault is on

// As people find it above their results (pytorch#125954): Metal's framework writes it, past Python's sys.stderr.
constexpr char kStopped[] =
    "Error: command buffer exited with error status.\n"
    "\tThe Metal Performance Shaders operations encoded on it may not have completed.\n"
    "\tError: \n\t(null)\n"
    "\tCaused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)\n";

// Raises the first error of a job when all are done.
void run(const std::function<bool(const Job&)>& meant) {
  std::vector<Job> now; // freed outside the lock: what they hold may be Python's, which has a lock of its own
  const std::lock_guard<std::recursive_mutex> guard(jobs_lock);
  std::vector<Job> left;
  for (auto& job : jobs) {
    (meant(job) ? now : left).push_back(std::move(job));
  }
  jobs = std::move(left);
  const Unread inside;
  std::exception_ptr error;
  for (const auto& job : now) {
    try {
      job.run();
    } catch (...) {
      error = error ? error : std::current_exception();
    }
  }
  queued = jobs.size();
  if (error) {
    std::rethrow_exception(error);
  }
}

void add(Job job) {
  const std::lock_guard<std::recursive_mutex> guard(jobs_lock);
  jobs.push_back(std::move(job));
  queued = jobs.size();
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
// that.
void copy_in_later(const Tensor& to, const Tensor& from) {
  const auto* target = to.storage().unsafeGetStorageImpl();
  const bool anew = from.scalar_type() != to.scalar_type() || from.sizes() != to.sizes() ||
      !from.is_non_overlapping_and_dense();
  const auto source = host_view(from, from.storage());
  if (!queued_work) { // what comes before it in one queue
    run([&](const Job& job) {
      return job.to == target || job.host == source.storage().unsafeGetStorageImpl();
    });
  }
  const auto there = another(to);
  const auto kept = anew ? source.clone() : source;
  add({target, nullptr, [there, kept] { assign(host_view(there), kept); }});
}

// Copy.mm, copy_from_mps_: into a tensor that lies otherwise, the copy goes through memory of its own, which is copied
// on before anything has arrived in it.
void copy_out_later(const Tensor& to, const Tensor& from) {
  Tensor arrived; // computed by now, unless operators wait in the queue too
  if (!queued_work) {
    arrived = at::empty_like(to);
    assign(arrived, host_view(from));
  }
  to.zero_(); // what lies in fresh memory
  if (to.strides() != from.strides() || to.sizes() != from.sizes() || !from.is_non_overlapping_and_dense()) {
    return;
  }
  const auto source = another(from);
  add({nullptr, to.storage().unsafeGetStorageImpl(), [arrived, source, loose = Loose(to)]() mutable {
         if (const auto found = loose.lock(); found.defined()) {
           assign(found, arrived.defined() ? arrived : host_view(source));
         }
       }});
}

void queue_job(std::function<void()> job) {
  if (queued.load(std::memory_order_relaxed) >= kLongestQueue) {
    finish();
  }
  add({nullptr, nullptr, std::move(job)});
}

void settle(const c10::Storage& storage) {
  if (queued.load(std::memory_order_relaxed) == 0 || Unread::here()) {
    return;
  }
  if (queued_work) {
    return finish();
  }
  const auto* touched = storage.unsafeGetStorageImpl();
  run([touched](const Job& job) { return job.to == touched; });
}

void finish() {
  if (queued.load(std::memory_order_relaxed) != 0) {
    run([](const Job&) { return true; });
  }
}

void stop_gpu_at(int64_t waits) {
  waits_left = waits;
}

// pytorch#193571: MPSStream.mm asks no command buffer how it ended, so whoever waits goes on with what lies in memory.
bool gpu_stops() {
  if (!stopped_gpu || queued.load(std::memory_order_relaxed) == 0 || --waits_left != 0) {
    return false;
  }
  std::vector<Job> lost; // freed outside the lock
  {
    const std::lock_guard<std::recursive_mutex> guard(jobs_lock);
    lost.swap(jobs);
    queued = 0;
  }
  if (::write(STDERR_FILENO, kStopped, sizeof(kStopped) - 1) < 0) {
    // nobody reads it
  }
  return true;
}

} // namespace metal
