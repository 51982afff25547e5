// What PyTorch asks about the device: the hooks of the backend, the device guard, events.
//
// All streams fill one queue here, in the order of the calls. On a Mac they do not wait for each other.
#include "device.h"

#include <ATen/detail/MPSHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <unordered_map>

namespace metal {
namespace {

Profile the_profile;

using Clock = std::chrono::steady_clock;

struct Event {
  bool timed = false;
  bool recorded = false;
  Clock::time_point at;
};

class Events {
 public:
  uint32_t acquire(bool timed) {
    std::lock_guard<std::mutex> lock(mutex_);
    events_[++last_] = Event{timed, false, {}};
    return last_;
  }

  void release(uint32_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    events_.erase(id);
  }

  void record(uint32_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    Event& event = find(id);
    event.recorded = true;
    event.at = Clock::now();
  }

  bool recorded(uint32_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(id).recorded;
  }

  double milliseconds(uint32_t start, uint32_t end) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Event& first = find(start);
    const Event& second = find(end);
    // MPSEvent.mm, elapsedTime
    TORCH_CHECK(first.timed && second.timed, "Events were not created with argument 'enable_timing=True'");
    TORCH_CHECK(first.recorded, "Start event with ID ", start, " not recorded yet");
    TORCH_CHECK(second.recorded, "End event with ID ", end, " not recorded yet");
    TORCH_CHECK(second.at >= first.at, "End event with ID ", end, " was not recorded after start event with ID ", start);
    return std::chrono::duration<double, std::milli>(second.at - first.at).count();
  }

 private:
  Event& find(uint32_t id) {
    auto found = events_.find(id);
    TORCH_CHECK(found != events_.end(), "no event with ID ", id);
    return found->second;
  }

  std::mutex mutex_;
  std::unordered_map<uint32_t, Event> events_;
  uint32_t last_ = 0;
};

Events& events() {
  static auto* all = new Events();
  return *all;
}

class Hooks : public at::MPSHooksInterface {
 public:
  void init() const override {}
  bool hasMPS() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  bool isOnMacOSorNewer(unsigned major, unsigned minor) const override {
    const auto& mac = profile();
    return std::pair(mac.macos_major, mac.macos_minor) >= std::pair(static_cast<int>(major), static_cast<int>(minor));
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return device();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return new_generator();
  }
  c10::Allocator* getMPSDeviceAllocator() const override {
    return allocator();
  }
  void deviceSynchronize() const override {
    wait("synchronize");
  }
  void commitStream() const override {}
  void emptyCache() const override {
    wait("empty_cache"); // MPSAllocator.mm, release_cached_buffers
    empty_cache();
  }
  size_t getCurrentAllocatedMemory() const override {
    return memory_figures().current;
  }
  size_t getDriverAllocatedMemory() const override {
    return memory_figures().driver;
  }
  size_t getRecommendedMaxMemory() const override {
    return profile().recommended_max;
  }
  void setMemoryFraction(double ratio) const override {
    set_memory_ratio(ratio);
  }
  bool isPinnedPtr(const void*) const override {
    return false;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetCPUAllocator(); // unified memory: nothing to pin
  }
  void profilerStartTrace(const std::string&, bool) const override {}
  void profilerStopTrace() const override {}
  uint32_t acquireEvent(bool timed) const override {
    return events().acquire(timed);
  }
  void releaseEvent(uint32_t id) const override {
    events().release(id);
  }
  void recordEvent(uint32_t id) const override {
    events().record(id);
  }
  void waitForEvent(uint32_t) const override {}
  void synchronizeEvent(uint32_t) const override {
    wait("event");
  }
  bool queryEvent(uint32_t id) const override {
    return events().recorded(id);
  }
  double elapsedTimeOfEvents(uint32_t start, uint32_t end) const override {
    wait("event"); // MPSEvent.mm, elapsedTime
    return events().milliseconds(start, end);
  }
};

// MPSStream.h: from torch 2.15 on there are the default stream, 0, and a pool of 32. Each thread has a current one.
constexpr bool kSeveralStreams = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15;
constexpr c10::StreamId kPool = 32;
thread_local c10::StreamId current_stream = 0;
std::atomic<uint64_t> taken_from_pool{0};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return c10::DeviceType::MPS;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return device();
  }
  c10::Device getDevice() const override {
    return device();
  }
  void setDevice(c10::Device given) const override {
    TORCH_CHECK(given.is_mps(), "Expected a MPS device, but got ", given);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return stream(current_stream);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return stream(0);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return stream(kSeveralStreams ? 1 + static_cast<c10::StreamId>(taken_from_pool++ % kPool) : 0);
  }
  c10::Stream exchangeStream(c10::Stream given) const override {
    const auto previous = stream(current_stream);
    if constexpr (kSeveralStreams) {
      TORCH_CHECK(given.id() >= 0 && given.id() <= kPool, "stream_id=", given.id()); // MPSStream.mm, getStreamByID
      current_stream = given.id();
    }
    return previous;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (!*event) {
      *event = new uint32_t(events().acquire(flag == c10::EventFlag::BACKEND_DEFAULT));
    }
    events().record(*static_cast<uint32_t*>(*event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event) {
      events().release(*static_cast<uint32_t*>(event));
      delete static_cast<uint32_t*>(event);
    }
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    return !event || events().recorded(*static_cast<uint32_t*>(event));
  }
  void synchronizeEvent(void*) const override {
    wait("event");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    wait("synchronize");
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    wait("event");
    return events().milliseconds(*static_cast<uint32_t*>(start), *static_cast<uint32_t*>(end));
  }

 private:
  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device(), id);
  }
};

} // namespace

const Profile& profile() {
  return the_profile;
}

void start(Profile given) {
  the_profile = std::move(given);
  static Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::MPS)].store(&guard);
  c10::SetAllocator(c10::DeviceType::MPS, allocator());
  // PyTorch looks the hooks up once, under this very name.
  at::MPSHooksRegistry()->Register("MPSHooks", [](auto&&...) { return std::unique_ptr<at::MPSHooksInterface>(new Hooks()); });
  TORCH_CHECK(at::detail::getMPSHooks().hasMPS(), "something in this process asked PyTorch for Metal before");
}

} // namespace metal
