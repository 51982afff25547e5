// The simulated Metal device: what its parts know of each other.
//
//   memory.cpp     bytes: the allocator, storages that alias between the CPU and the device
//   heaps.cpp      what the driver counts for them: heaps, buffers that are kept, watermarks
//   generator.cpp  the device's own random numbers
//   hooks.cpp      what PyTorch asks about the device: hooks, device guard, events
//   loan.cpp       host tensors over the same memory for the arguments and results of a call
//   host.cpp       one boxed kernel that runs any operator on the host over the same memory
//   kernels.cpp    operators that cannot go that way: factories, storage, dropout
//   metal_only.cpp operators that only the Metal backend has: convolution, linear_backward, …
//   recurrent.cpp  nn.LSTM as one operator
//   sparse.cpp     sparse COO tensors
//   composite.cpp  operators whose code branches by device: copies, attention, convolution, LSTM
//   faults.cpp     wrong results that some Macs give without an error
//   indices.cpp    what happens to indices out of range
//   permuted.cpp   kernels that read permuted tensors wrongly
//   refusals.cpp   what Metal refuses, and what ends the process
//   dtypes.cpp     which dtypes Metal's kernels take, and what they make of them
//   misread.cpp    kernels that are wrong about what lies in their arguments
//   sizes.cpp      kernels that are wrong for tensors larger than they can count
//   work.cpp       what the device was given to do: launches, copies, waits
//   queue.cpp      copies that nobody waits for
//   deferred.cpp   operators that wait in the queue as well
//   order.cpp      sums whose terms come in any order
//   fallback.cpp   what happens to an operator without a Metal kernel
//   module.cpp     torch._C's `_mps_*` functions
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace c10 {
class OperatorHandle;
struct FunctionSchema;
}
namespace torch {
class CppFunction;
}

namespace metal {

using Arguments = c10::ArrayRef<c10::IValue>;
using Operator = c10::OperatorHandle;
using Stack = torch::jit::Stack;

struct Profile {
  std::string chip;
  int cores = 0;
  size_t recommended_max = 0; // bytes
  int macos_major = 0;
  int macos_minor = 0;
};

const Profile& profile();

inline c10::Device device() {
  return c10::Device(c10::DeviceType::MPS, 0);
}

// ---- heaps.cpp ----

struct MemoryFigures {
  size_t current; // bytes held by tensors
  size_t driver;  // bytes of the heaps that they lie in, whether full or not
  size_t peak;    // largest `current` since the last reset
};

extern std::atomic<bool> heaps_counted; // the driver counts whole heaps
extern std::atomic<bool> whole_buffers; // what is freed stays a buffer of its size
struct Buffer;
// A place for `size` bytes. Raises Metal's two errors of too little memory.
Buffer* take_buffer(size_t size);
void give_buffer(Buffer* buffer, size_t size);
MemoryFigures memory_figures();
void reset_peak();
void empty_cache();
// Raises unless 0 <= ratio <= 2; 0 means without limit (torch.mps.set_per_process_memory_fraction).
void set_memory_ratio(double ratio);

// ---- memory.cpp ----

c10::Allocator* allocator();

// Metal has no float64: raises the TypeError that a Mac raises.
void check_dtype(c10::ScalarType dtype);

// A CPU storage over the same bytes, without a copy. It does not own them; growing it gives it memory of its own.
c10::Storage borrow(const c10::Storage& storage);
// The same, and it keeps the device storage alive: torch.mps._host_alias_storage.
c10::Storage host_alias(const c10::Storage& storage);
// A device storage that takes over a CPU storage's memory, without a copy, and counts it in the budget.
c10::Storage adopt(c10::Storage host);
// Replaces the bytes behind a device storage by those of a CPU storage that has grown.
void adopt_into(const c10::Storage& storage, c10::Storage host);

// A CPU tensor over the same bytes with the same sizes, strides and offset.
at::Tensor host_view(const at::Tensor& tensor, c10::Storage host);
inline at::Tensor host_view(const at::Tensor& tensor) {
  return host_view(tensor, borrow(tensor.storage()));
}
inline at::Tensor host(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_mps() ? host_view(tensor) : tensor;
}
inline std::optional<at::Tensor> host(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional(host(*tensor)) : std::nullopt;
}
// The device tensor for a CPU tensor, over `storage`.
at::Tensor device_view(const at::Tensor& host, c10::Storage storage);
// The same as a view of a device tensor: in inference mode it is a normal tensor where that one is.
at::Tensor device_view_of(const at::Tensor& base, const at::Tensor& host);
// The device tensor that takes over a fresh CPU result.
at::Tensor adopt(const at::Tensor& host);

// ---- generator.cpp ----

const at::Generator& default_generator();
at::Generator new_generator();
// The CPU generator that makes the next draw of `generator` (the device's default where it is undefined).
at::Generator next_draw(const std::optional<at::Generator>& generator);

// ---- module.cpp ----

// The device is in use from here on: children that are forked now must not use it.
void touch_device();

// ---- hooks.cpp ----

void start(Profile given);

// ---- work.cpp ----

// Counted since the device was loaded.
struct Work {
  std::atomic<int64_t> waits{0};
  std::atomic<int64_t> copies_in{0}; // from the host to the device
  std::atomic<int64_t> copies_out{0};
  std::atomic<int64_t> bytes_in{0};
  std::atomic<int64_t> bytes_out{0};
};

extern Work work;

// An operator that computes is called; `name` is as "aten::mm" or "aten::add.Tensor". Who wants to know names calls
// name_launches first; calls.h has what a Mac launches for it.
void launched(const std::string& name, c10::ArrayRef<c10::IValue> given = {});

// One call, whatever the operators are that it is made of here.
struct OneLaunch {
  OneLaunch(const std::string& name, c10::ArrayRef<c10::IValue> given);
  ~OneLaunch();
  OneLaunch(const OneLaunch&) = delete;
  OneLaunch& operator=(const OneLaunch&) = delete;
};

void name_launches(bool wanted);
std::map<std::string, int64_t> named_launches();

inline void copied_in(size_t bytes) {
  work.copies_in.fetch_add(1, std::memory_order_relaxed);
  work.bytes_in.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
}

inline void copied_out(size_t bytes) {
  work.copies_out.fetch_add(1, std::memory_order_relaxed);
  work.bytes_out.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
}

// Somebody waits until the device has done all its work; `why` is the call that does. Raises what went wrong meanwhile.
void wait(const char* why);
// Called with each wait's reason, on the thread that waits; null for nobody.
using Listener = void (*)(const char* why);
void listen_to_waits(Listener listener);
// How often an operator waits before its result is there, from its arguments; null where it never does.
using Waits = int64_t (*)(c10::ArrayRef<c10::IValue> given);
Waits waits_of(const std::string& name);

// ---- queue.cpp ----

extern std::atomic<bool> late_copies; // copies that need not wait are done as late as the device may come to them
void copy_in_later(const at::Tensor& to, const at::Tensor& from);
void copy_out_later(const at::Tensor& to, const at::Tensor& from);
// Somebody touches the bytes of a device storage: copies into it that are queued are done.
void settle(const c10::Storage& storage);
// All copies that are queued are done.
void finish();

// ---- faults.cpp ----

// Changes an operator's result, on the host, as a fault does that is on; it is given the operator's host arguments.
using Fault = void (*)(c10::ArrayRef<c10::IValue> arguments, const at::Tensor& result);
// The fault of the operator called `name`, without its overload, or null.
Fault fault_of(const std::string& name);
// The same for linear_backward, on matrices: its rows and incoming gradients, and the gradients that it computed.
void linear_backward_faults(
    const at::Tensor& rows, const at::Tensor& grad, const at::Tensor& of_input, const at::Tensor& of_weight);
// Makes a copy from the device to the CPU that also changes the dtype, as a fault does that is on; false where none is.
bool faulty_copy(const at::Tensor& to, const at::Tensor& from);
void switch_fault(const std::string& name, bool on);
std::vector<std::string> faults_on();
// The most values that a matrix product with both sides from 16 has summed over since the last call.
int64_t take_longest_sum();
// Called with memory that is about to be freed.
void remember_freed(const void* memory, size_t bytes);

// ---- sizes.cpp ----

struct SizeFaults {
  std::atomic<bool> products{false};
  std::atomic<bool> cat{false};
  std::atomic<bool> embedding{false};
  std::atomic<bool> batch{false};
};

extern SizeFaults size_faults;
// Changes a batched product, on the host, as the fault does that is on.
void huge_product(const at::Tensor& one, const at::Tensor& other, const at::Tensor& result, const at::Scalar& alpha);
void huge_cat(const at::Tensor& result);
// Refuses the gradient of an embedding that Metal's kernel cannot index.
void check_embedding_gradient(const at::Tensor& grad, const at::Tensor& indices, int64_t rows);
// How many rows of a batch a convolution's weight gradient takes into account, where that is not all.
std::optional<int64_t> counted_batch(const at::Tensor& input);
// Lets a fault begin at another number of elements and returns the former one.
int64_t set_limit(const std::string& name, int64_t elements);

// ---- indices.cpp ----

extern std::atomic<bool> silent_indices; // zeros are read, nothing is written
extern std::atomic<bool> late_indices; // the same, and an error when somebody waits for the device
// Runs an operator on the CPU, its host arguments on the stack; null for operators that need nothing special.
using Inside = void (*)(const c10::OperatorHandle& op, torch::jit::Stack* stack);
Inside inside_of(const std::string& name);
// Raises the error of an index that was out of range earlier, once.
void raise_late_error();

// ---- permuted.cpp ----

extern std::atomic<bool> permuted_activations;
extern std::atomic<bool> mixed_layer_norm;
Inside permuted_inside_of(const std::string& name);

// ---- misread.cpp ----

extern std::atomic<bool> conv3d_layout; // a 3-D convolution reads its input as if the channels lay last
Inside misread_inside_of(const std::string& name);
// The volume that a 3-D convolution sees, on the host.
at::Tensor misread_volume(const at::Tensor& input);

// ---- recurrent.cpp ----

extern std::atomic<bool> lstm_dropout; // the backward pass knows nothing of the dropout between layers

// ---- order.cpp ----

extern std::atomic<bool> atomic_order;
Inside order_inside_of(const std::string& name);
void index_add_in_any_order(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void scatter_add_in_any_order(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// ---- refusals.cpp ----

extern std::atomic<bool> refusals; // errors of Metal's kernels, where the CPU computes

// Aborts of the process, by MetalPerformanceShaders' own assertions.
struct Aborts {
  std::atomic<bool> layer_norm{false};
  std::atomic<bool> linear_vector{false};
  std::atomic<bool> linear_deep{false};
  std::atomic<bool> linear_empty{false};
};

extern Aborts aborts;
// Looks at a call before it is computed or queued: raises what Metal raises, or ends the process.
using Check = void (*)(c10::ArrayRef<c10::IValue> arguments);
// The check of the operator called `name`, without its overload, or null.
Check check_of(const std::string& name);
void check_linear_backward(const at::Tensor& self, const at::Tensor& grad_output, const at::Tensor& weight);
// `wide` has the sizes that may not be above 65,536 before macOS 15.1.
void check_convolution(const at::Tensor& self, const at::Tensor& weight, c10::IntArrayRef wide);
void check_convolution_transpose(const at::Tensor& self);

// ---- kernels, each registered one by one ----

void register_kernels(); // kernels.cpp
void register_metal_only(); // metal_only.cpp
void register_recurrent(); // recurrent.cpp
void register_composites(); // composite.cpp
// host.cpp: the host kernel for each named operator ("aten::add.Tensor") that has no kernel of its own here.
void register_host_kernels(const std::vector<std::string>& names);
void register_torchvision();
// host.cpp: the same for one operator, which `inside` runs on the CPU.
torch::CppFunction host_kernel(const c10::FunctionSchema& schema, Inside inside, Waits waits);
// sparse.cpp: for each dispatch key the operators, and whether the CPU has the very same function for them.
using SparseKernels = std::map<std::string, std::map<std::string, bool>>;
void register_sparse(const SparseKernels& kernels);
// fallback.cpp: `commit` is torch's, for the text of the error.
void register_fallback(const std::string& commit, const std::vector<std::string>& always_on_cpu);

} // namespace metal
