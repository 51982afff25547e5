// Work that the device comes to later: queue.cpp for copies, deferred.cpp for operators.
#pragma once

#include "device.h"

#include <functional>

namespace metal {

extern std::atomic<bool> queued_work; // operators wait in the queue too, until somebody waits for them

// A fault: the device never computes what was queued when somebody waits for the `waits`-th time from now on, with work
// in the queue. Those before and after it are as ever.
extern std::atomic<bool> stopped_gpu;
void stop_gpu_at(int64_t waits);
// Whether that wait is now: then what was queued is gone.
bool gpu_stops();

// Does `job` when the device comes to it. What it holds of the device's tensors, it holds as `alias` gives it.
void queue_job(std::function<void()> job);
// Queues the operator whose arguments are on the stack, and leaves results in their place that are filled when the
// device has come to it; `compute` is the operator itself, on such a stack, its generator drawn. False where nobody can
// say what the results will look like: the caller computes at once.
bool queue_call(
    const c10::OperatorHandle& op,
    torch::jit::Stack* stack,
    std::optional<size_t> generator,
    std::function<void(torch::jit::Stack*)> compute);

// Another tensor over the same storage: autograd counts who holds a tensor.
inline at::Tensor another(const at::Tensor& tensor) {
  return tensor.defined() ? device_view(tensor, tensor.storage()) : tensor;
}

// While one of these lives, this thread's access to the device's memory does not mean that somebody reads it.
class Unread {
 public:
  Unread() {
    ++depth;
  }
  ~Unread() {
    --depth;
  }
  Unread(const Unread&) = delete;
  static bool here() {
    return depth > 0;
  }

 private:
  static thread_local int depth;
};

} // namespace metal
