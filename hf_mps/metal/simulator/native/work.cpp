// What the device was given to do: launches, copies, and who waited for it.
//
// Metal encodes work into a queue and runs on; a wait (SyncType::COMMIT_AND_WAIT in MPSStream.mm) ends that, and what
// the device could have done meanwhile is lost. Which calls wait is read from aten/src/ATen/mps and
// aten/src/ATen/native/mps/operations: Copy.mm, Scalar.mm, Indexing.mm, MPSAllocator.mm, MPSEvent.mm, and for operators
// whose result is only as large as its values say, the places named below.
#include "calls.h"
#include "queue.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <mutex>

namespace metal {

Work work;

namespace {

using at::Tensor;

std::atomic<Listener> the_listener{nullptr};

std::atomic<bool> naming{false};
std::mutex names_lock;
std::map<std::string, int64_t> names;

thread_local int64_t within = 0;

// Indexing.mm: releases without nonzero_static drain the queue before they count, and then read the count.
int64_t of_nonzero() {
  static const bool counts_itself =
      c10::Dispatcher::singleton().findSchema({"aten::nonzero_static", ""}).has_value() &&
      c10::Dispatcher::singleton().findSchema({"aten::nonzero_static", ""})->hasKernelForDispatchKey(
          c10::DispatchKey::MPS);
  return counts_itself ? 1 : 2;
}

int64_t waits_of_nonzero(Arguments given) {
  return given[0].toTensor().numel() > 0 ? of_nonzero() : 0;
}

// A mask among the indices is turned into positions by nonzero.
int64_t index(Arguments given) {
  int64_t masks = 0;
  const auto list = given[1].toOptionalTensorList();
  for (const std::optional<Tensor> each : list) {
    masks += each && each->defined() && each->is_mps() &&
        (each->scalar_type() == at::kBool || each->scalar_type() == at::kByte);
  }
  return masks * of_nonzero();
}

// Unique.mm reads the number of different values.
int64_t unique(Arguments given) {
  return given[0].toTensor().numel() > 0 ? 1 : 0;
}

int64_t equal(Arguments given) {
  return given[0].toTensor().numel() > 0 ? 1 : 0;
}

// Distributions.mm looks whether the weights are weights; with replacement it does not.
int64_t multinomial(Arguments given) {
  const bool looks = !given[2].toBool() || given[1].toInt() == 1;
  return looks ? 2 : 0;
}

// Repeat.mm, where the caller does not tell the length: the sum of the repeats, and whether one is negative.
int64_t repeat_interleave(Arguments given) {
  return given[1].isNone() ? 2 : 0;
}

// SummaryOps.mm reads the least and the largest value.
int64_t bincount(Arguments) {
  return 2;
}

// HistogramKernel.mm reads each edge of the bins by itself.
int64_t histogram(Arguments given) {
  const auto& bins = given[1];
  const int64_t edges = bins.isTensor() ? bins.toTensor().numel() : bins.toInt() + 1;
  const bool looks = !bins.isTensor() && given[2].isNone();
  return edges + (looks ? 2 : 0);
}

int64_t histc(Arguments given) {
  const bool looks = given[2].toScalar().toDouble() == given[3].toScalar().toDouble();
  return given[1].toInt() + 1 + (looks ? 2 : 0);
}

// ConstantOps.mm, Indexing.mm: a value on the device is read before it is filled in.
int64_t value(Arguments given) {
  const auto& last = given.back();
  return last.isTensor() && last.toTensor().is_mps() ? 1 : 0;
}

void note_name(const std::string& name) {
  if (naming.load(std::memory_order_relaxed)) {
    const std::lock_guard<std::mutex> lock(names_lock);
    ++names[name];
  }
}

} // namespace

Waits waits_of(const std::string& name) {
  static const std::map<std::string, Waits> all{
      {"nonzero", &waits_of_nonzero},
      {"masked_select", &waits_of_nonzero},
      {"_to_sparse", &waits_of_nonzero},
      {"masked_scatter_", &waits_of_nonzero},
      {"index", &index},
      {"_index_put_impl_", &index},
      {"_unique", &unique},
      {"_unique2", &unique},
      {"unique_dim", &unique},
      {"unique_consecutive", &unique},
      {"unique_dim_consecutive", &unique},
      {"equal", &equal},
      {"multinomial", &multinomial},
      {"repeat_interleave", &repeat_interleave},
      {"bincount", &bincount},
      {"histogram", &histogram},
      {"histc", &histc},
      {"fill_", &value},
      {"masked_fill_", &value},
  };
  const auto found = all.find(name);
  return found == all.end() ? nullptr : found->second;
}

void launched(const std::string& name, Arguments given) {
  if (within == 0) {
    record(name, given);
    note_name(name);
  }
}

void launched_outside(const std::string& name, const std::string& text) {
  if (recording()) {
    record(text);
  }
  note_name(name);
}

OneLaunch::OneLaunch(const std::string& name, Arguments given) {
  launched(name, given);
  ++within;
}

OneLaunch::~OneLaunch() {
  --within;
}

void name_launches(bool wanted) {
  naming = wanted;
}

std::map<std::string, int64_t> named_launches() {
  const std::lock_guard<std::mutex> lock(names_lock);
  return names;
}

void wait(const char* why) {
  work.waits.fetch_add(1, std::memory_order_relaxed);
  if (!gpu_stops()) {
    finish();
  }
  if (const auto listener = the_listener.load(std::memory_order_relaxed)) {
    listener(why);
  }
  raise_late_error();
}

void listen_to_waits(Listener listener) {
  the_listener = listener;
}

} // namespace metal
