// A heap of the driver's, the places in it, and the buffers that lie there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace metal {

struct Pool;

class Heap {
 public:
  Heap(size_t size, Pool* of, bool many) : total(size), pool(of), split(many) {
    open(0, size);
  }

  // The most bytes in one piece.
  size_t room() const {
    return by_size_.empty() ? 0 : by_size_.rbegin()->first;
  }

  // The place of `size` bytes, which fit.
  size_t cut(size_t size) {
    const auto [length, at] = *by_size_.lower_bound({size, 0});
    close(at, length);
    if (length > size) {
      open(at + size, length - size);
    }
    ++buffers;
    return at;
  }

  void join(size_t at, size_t size) {
    auto next = by_place_.lower_bound(at);
    if (next != by_place_.begin()) {
      const auto before = *std::prev(next);
      if (before.first + before.second == at) {
        close(before.first, before.second);
        at = before.first;
        size += before.second;
      }
    }
    if (next != by_place_.end() && next->first == at + size) {
      const auto after = *next;
      close(after.first, after.second);
      size += after.second;
    }
    open(at, size);
    --buffers;
  }

  const size_t total;
  Pool* const pool;
  const bool split; // for several buffers
  size_t buffers = 0; // in use or kept

 private:
  void open(size_t at, size_t size) {
    by_place_[at] = size;
    by_size_.insert({size, at});
  }

  void close(size_t at, size_t size) {
    by_place_.erase(at);
    by_size_.erase({size, at});
  }

  std::map<size_t, size_t> by_place_; // what is free: from where, how much
  std::set<std::pair<size_t, size_t>> by_size_; // the same, the other way round
};

struct Buffer {
  size_t size;
  Heap* heap;
  size_t at;
  uint32_t age = 0; // allocations since it was freed
};

struct Pool {
  explicit Pool(bool of_small) : small(of_small) {}

  void keep(Buffer* buffer) {
    kept.insert({buffer->size, buffer});
    kept_bytes += buffer->size;
  }

  void unkeep(Buffer* buffer) {
    kept.erase({buffer->size, buffer});
    kept_bytes -= buffer->size;
  }

  const bool small;
  std::set<std::pair<size_t, Heap*>> heaps; // with the room in each
  std::set<std::pair<size_t, Buffer*>> kept; // freed buffers, with their sizes
  size_t kept_bytes = 0;
};

} // namespace metal
