// How the driver comes to hold more than tensors do: heaps, buffers kept for the next of their size, watermarks.
//
// aten/src/ATen/mps/MPSAllocator.h and .mm: buffers up to 1 MiB lie in heaps of 8 MiB, those below 10 in heaps of 32,
// those below 512 in heaps of a gigabyte, and larger ones, or large ones under memory pressure, in a heap of their own.
// The driver counts whole heaps. A buffer that is freed stays where it is for the next of about its size; torch 2.14
// cuts and joins what is free instead (pull request #188045). Only places are kept here: the bytes are the host's.
#include "device.h"
#include "heap.h"

#include <c10/util/Exception.h>

#include <pthread.h>

#include <cstdlib>
#include <iomanip>
#include <limits>
#include <mutex>
#include <sstream>
#include <string>

#include <torch/version.h>

namespace metal {

std::atomic<bool> heaps_counted{false};
std::atomic<bool> whole_buffers{false};

namespace {

constexpr size_t kMega = size_t(1) << 20;
constexpr size_t kSmallBuffer = kMega;
constexpr size_t kLargeBuffer = 10 * kMega;
constexpr size_t kSmallHeap = 8 * kMega;
constexpr size_t kLargeHeap = 32 * kMega;
constexpr size_t kXLargeHeap = 1024 * kMega;
constexpr size_t kRound = 2 * kMega; // of heaps for one buffer

constexpr double kHighRatio = 1.7; // of the recommended maximum: default_high_watermark_ratio
constexpr double kLargestRatio = 2.0; // default_high_watermark_upper_bound
constexpr double kLowRatio = 1.4; // default_low_watermark_ratio
// MTLDevice.maxBufferLength, of the recommended maximum: 36 GiB on a Mac of 64 (gfx-rs/wgpu#2502), 27 of 48
// (exo-explore/exo#1048), 156 where 208 are recommended (MLX's device_info of an M3 Ultra): half of a small Mac's memory.
constexpr double kLargestBuffer = 0.75;

std::string readable(size_t bytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(2);
  const double size = static_cast<double>(bytes);
  if (bytes <= 1024) {
    out << bytes << " bytes";
  } else if (bytes <= kMega) {
    out << size / 1024 << " KiB";
  } else if (bytes <= 1024 * kMega) {
    out << size / kMega << " MiB";
  } else {
    out << size / (1024 * kMega) << " GiB";
  }
  return out.str();
}

size_t recommended(double ratio) {
  return static_cast<size_t>(ratio * static_cast<double>(profile().recommended_max));
}

double ratio_from(const char* variable, double otherwise) {
  const char* given = std::getenv(variable);
  return given ? std::strtod(given, nullptr) : otherwise;
}

class Heaps {
 public:
  Heaps() {
    set_high(ratio_from("PYTORCH_MPS_HIGH_WATERMARK_RATIO", kHighRatio));
    set_low(ratio_from("PYTORCH_MPS_LOW_WATERMARK_RATIO", kLowRatio));
  }

  Buffer* take(size_t size) {
    TORCH_CHECK(size < recommended(kLargestBuffer), "Invalid buffer size: ", readable(size));
    const std::lock_guard<std::mutex> lock(mutex_);
    Buffer* buffer = heaps_counted ? placed(size) : nullptr;
    if (!heaps_counted) {
      if (limit_ - std::min(limit_, live_) < size) {
        refuse(live_, size);
      }
      loose_ += size;
      loose_driver_ = std::max(loose_driver_, loose_);
    }
    live_ += size;
    peak_ = std::max(peak_, live_);
    return buffer;
  }

  void give(Buffer* buffer, size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    live_ -= size;
    if (buffer == nullptr) {
      loose_ -= size;
      return;
    }
    if (!whole_buffers && buffer->heap->split) {
      release(buffer, false);
      return;
    }
    buffer->heap->pool->keep(buffer);
  }

  MemoryFigures figures() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {live_, total_ + loose_driver_, peak_};
  }

  void reset_peak() {
    const std::lock_guard<std::mutex> lock(mutex_);
    peak_ = live_;
  }

  void empty_cache() {
    const std::lock_guard<std::mutex> lock(mutex_);
    release_all();
    loose_driver_ = loose_;
  }

  void set_ratio(double ratio) {
    const std::lock_guard<std::mutex> lock(mutex_);
    set_high(ratio);
  }

  void lock() {
    mutex_.lock();
  }

  void unlock() {
    mutex_.unlock();
  }

 private:
  void set_high(double ratio) {
    TORCH_CHECK(ratio >= 0.0 && ratio <= kLargestRatio, "invalid high watermark ratio ", ratio);
    high_ = ratio;
    limit_ = ratio == 0.0 ? std::numeric_limits<size_t>::max() : recommended(ratio);
  }

  void set_low(double ratio) {
    TORCH_CHECK(
        ratio >= 0.0 && ratio <= (high_ == 0.0 ? kLargestRatio : high_), "invalid low watermark ratio ", ratio);
    low_ = ratio == 0.0 ? std::numeric_limits<size_t>::max() : recommended(ratio);
  }

  // alloc_buffer_block
  Buffer* placed(size_t size) {
    Pool& pool = size <= kSmallBuffer ? small_ : large_;
    bool pressure = !pool.small && low_ - std::min(low_, total_) < kMega;
    Buffer* found = kept(pool, size, pressure);
    if (found == nullptr) {
      if (pressure && size < pool.kept_bytes) {
        collect(pool);
      }
      found = fresh(pool, size, pressure);
    }
    if (found == nullptr && release_enough(pool, size)) {
      found = fresh(pool, size, pressure);
    }
    if (found == nullptr) {
      release_all();
      found = fresh(pool, size, pressure);
    }
    if (found == nullptr) {
      refuse(total_, size);
    }
    found->age = 0;
    return found;
  }

  // get_free_buffer: one that was kept, of at most 32 MiB more; a larger one makes room in its heap.
  Buffer* kept(Pool& pool, size_t size, bool& pressure) {
    if (limit_ - std::min(limit_, total_) < size) {
      return nullptr;
    }
    if (low_ != std::numeric_limits<size_t>::max() && !pool.small) {
      for (const auto& [bytes, buffer] : pool.kept) {
        ++buffer->age;
      }
    }
    const auto found = pool.kept.lower_bound({size, nullptr});
    if (found == pool.kept.end()) {
      return nullptr;
    }
    auto* buffer = found->second;
    if (buffer->size <= size + kLargeHeap) {
      pool.unkeep(buffer);
      return buffer;
    }
    if (pool.heaps.lower_bound({size, nullptr}) == pool.heaps.end()) {
      release_kept(buffer, false);
      pressure = false;
    }
    return nullptr;
  }

  // alloc_buffer
  Buffer* fresh(Pool& pool, size_t size, bool pressure) {
    if (limit_ - std::min(limit_, total_) < size) {
      return nullptr;
    }
    auto found = pool.heaps.lower_bound({size, nullptr});
    Heap* heap = nullptr;
    if (found != pool.heaps.end()) {
      heap = found->second;
      pool.heaps.erase(found);
    } else {
      heap = new_heap(pool, size, pressure);
    }
    auto* buffer = new Buffer{size, heap, heap->cut(size)};
    pool.heaps.insert({heap->room(), heap});
    return buffer;
  }

  // createHeapBlock
  Heap* new_heap(Pool& pool, size_t size, bool pressure) {
    size_t bytes = (size + kRound - 1) / kRound * kRound;
    bool split = true;
    if (size <= kSmallBuffer) {
      bytes = kSmallHeap;
    } else if (size < kLargeBuffer) {
      bytes = kLargeHeap;
    } else if (size < kXLargeHeap / 2 && !pressure) {
      bytes = kXLargeHeap;
    } else {
      split = false;
    }
    total_ += bytes;
    return new Heap(bytes, &pool, split);
  }

  // Gives a buffer's place back to its heap, and an empty heap to the driver where that is wanted.
  void release(Buffer* buffer, bool with_heap) {
    Heap* heap = buffer->heap;
    Pool& pool = *heap->pool;
    pool.heaps.erase({heap->room(), heap});
    heap->join(buffer->at, buffer->size);
    delete buffer;
    if (heap->buffers == 0 && with_heap) {
      total_ -= heap->total;
      delete heap;
    } else {
      pool.heaps.insert({heap->room(), heap});
    }
  }

  void release_kept(Buffer* buffer, bool with_heap) {
    buffer->heap->pool->unkeep(buffer);
    release(buffer, with_heap);
  }

  // release_available_cached_buffers: the next larger one, or the largest until there is as much.
  bool release_enough(Pool& pool, size_t size) {
    const auto larger = pool.kept.lower_bound({size, nullptr});
    if (larger != pool.kept.end()) {
      release_kept(larger->second, true);
      return true;
    }
    size_t released = 0;
    while (released < size && !pool.kept.empty()) {
      auto* largest = pool.kept.rbegin()->second;
      released += largest->size;
      release_kept(largest, true);
    }
    return released >= size;
  }

  // release_cached_buffers, and the heaps that joining left empty.
  void release_all() {
    for (Pool* pool : {&small_, &large_}) {
      while (!pool->kept.empty()) {
        release_kept(pool->kept.begin()->second, true);
      }
      for (auto it = pool->heaps.begin(); it != pool->heaps.end();) {
        Heap* heap = it->second;
        if (heap->buffers > 0) {
          ++it;
          continue;
        }
        it = pool->heaps.erase(it);
        total_ -= heap->total;
        delete heap;
      }
    }
  }

  // garbage_collect_cached_buffers: those that waited longest, until the low watermark is reached again.
  void collect(Pool& pool) {
    if (total_ < low_) {
      return;
    }
    const size_t target = total_ - low_;
    double ages = 0.0;
    for (const auto& [bytes, buffer] : pool.kept) {
      ages += buffer->age;
    }
    size_t reclaimed = 0;
    bool freed = true;
    while (reclaimed < target && freed && !pool.kept.empty()) {
      const double threshold = ages / static_cast<double>(pool.kept.size());
      freed = false;
      for (auto it = pool.kept.begin(); it != pool.kept.end() && reclaimed < target;) {
        auto* buffer = (it++)->second;
        if (buffer->age >= threshold) {
          freed = true;
          reclaimed += buffer->size;
          ages -= buffer->age;
          release_kept(buffer, !buffer->heap->split);
        }
      }
    }
  }

  // The text of MPSAllocator.mm (torch 2.13, alloc_buffer_block).
  [[noreturn]] void refuse(size_t held, size_t bytes) const {
    TORCH_CHECK(
        false,
        "MPS backend out of memory (MPS allocated: ",
        readable(held),
        ", other allocations: ",
        readable(0),
        ", max allowed: ",
        readable(limit_),
        "). Tried to allocate ",
        readable(bytes),
        " on shared pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory "
        "allocations (may cause system failure).");
    std::abort(); // not reached: TORCH_CHECK(false) throws
  }

  std::mutex mutex_;
  double high_ = kHighRatio;
  size_t limit_ = 0;
  size_t low_ = 0;
  size_t live_ = 0; // bytes of tensors
  size_t peak_ = 0;
  size_t total_ = 0; // bytes of heaps
  size_t loose_ = 0; // bytes of tensors that lie in no heap, for want of "heaps"
  size_t loose_driver_ = 0;
  Pool small_{true};
  Pool large_{false};
};

// Never destroyed: tensors may outlive static destruction. A fork waits for threads that are in the heaps, as autograd's
// may be just after a backward pass: the lock that they hold would stay held in the child, a worker of a data loader,
// which then could never free a tensor that it has from its parent.
Heaps& heaps() {
  static Heaps* the_heaps = [] {
    auto* made = new Heaps();
    pthread_atfork([] { heaps().lock(); }, [] { heaps().unlock(); }, [] { heaps().unlock(); });
    return made;
  }();
  return *the_heaps;
}

} // namespace

Buffer* take_buffer(size_t size) {
  return heaps().take(size);
}

void give_buffer(Buffer* buffer, size_t size) {
  heaps().give(buffer, size);
}

MemoryFigures memory_figures() {
  return heaps().figures();
}

void reset_peak() {
  heaps().reset_peak();
}

void empty_cache() {
  heaps().empty_cache();
}

void set_memory_ratio(double ratio) {
  heaps().set_ratio(ratio);
}

} // namespace metal
