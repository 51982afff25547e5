// Random numbers of the device's own: drawing here leaves the CPU's generator alone, and the other way round.
//
// The state has the size and layout of a Mac's (MPSGeneratorImpl.mm): seven words of Philox state, the seed, the offset
// in Philox's stream. Every draw is made by a CPU generator seeded from (seed, offset), so saving the state and
// restoring it repeats the same draws. The numbers themselves are not a Mac's; where a release's own kernels draw them
// (hf_mps/metal/kernels/launch/random.py), they read the seed and the offset here and set the offset as a Mac's host does.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Utils.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstring>
#include <mutex>

namespace metal {
namespace {

struct State {
  std::array<uint32_t, 7> words{};
  uint64_t seed = c10::detail::getNonDeterministicRandom();
  uint64_t offset = 0;
};
constexpr size_t kWordBytes = sizeof(uint32_t) * 7;
constexpr size_t kStateBytes = kWordBytes + 2 * sizeof(uint64_t);

// splitmix64: neighbouring seeds and draws give unrelated streams.
uint64_t mixed(uint64_t value) {
  value += 0x9E3779B97F4A7C15ULL;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

class MetalGenerator final : public c10::GeneratorImpl {
 public:
  MetalGenerator() : GeneratorImpl(metal::device(), c10::DispatchKeySet(c10::DispatchKey::MPS)) {
    set_current_seed(c10::default_rng_seed_val);
  }

  void set_current_seed(uint64_t seed) override {
    state_.seed = seed;
    state_.words.fill(1);
    state_.words[5] = static_cast<uint32_t>(seed); // the last two words are Philox's key
    state_.words[6] = static_cast<uint32_t>(seed >> 32);
    set_offset(0);
  }

  void set_offset(uint64_t offset) override {
    state_.offset = offset;
  }

  uint64_t get_offset() const override {
    return state_.offset;
  }

  uint64_t current_seed() const override {
    return state_.seed;
  }

  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state_.seed;
  }

  void set_state(const c10::TensorImpl& given) override {
    at::detail::check_rng_state(given);
    TORCH_CHECK(given.numel() == static_cast<int64_t>(kStateBytes), "RNG state is wrong size");
    const auto* bytes = static_cast<const uint8_t*>(given.data());
    std::memcpy(state_.words.data(), bytes, kWordBytes);
    std::memcpy(&state_.seed, bytes + kWordBytes, sizeof(state_.seed));
    std::memcpy(&state_.offset, bytes + kWordBytes + sizeof(state_.seed), sizeof(state_.offset));
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto tensor = at::detail::empty_cpu({static_cast<int64_t>(kStateBytes)}, c10::ScalarType::Byte);
    auto* bytes = static_cast<uint8_t*>(tensor.mutable_data_ptr());
    std::memcpy(bytes, state_.words.data(), kWordBytes);
    std::memcpy(bytes + kWordBytes, &state_.seed, sizeof(state_.seed));
    std::memcpy(bytes + kWordBytes + sizeof(state_.seed), &state_.offset, sizeof(state_.offset));
    return tensor.getIntrusivePtr();
  }

  uint64_t next_seed() {
    const uint64_t draw = get_offset();
    set_offset(draw + 1);
    return mixed(mixed(state_.seed) ^ draw);
  }

 private:
  MetalGenerator* clone_impl() const override {
    auto* copy = new MetalGenerator();
    copy->state_ = state_;
    return copy;
  }

  State state_;
};

} // namespace

const at::Generator& default_generator() {
  static auto* generator = [] {
    auto* made = new at::Generator(new_generator());
    made->set_current_seed(c10::detail::getNonDeterministicRandom());
    return made;
  }();
  return *generator;
}

at::Generator new_generator() {
  return at::make_generator<MetalGenerator>();
}

at::Generator next_draw(const std::optional<at::Generator>& given) {
  at::Generator generator = given && given->defined() ? *given : default_generator();
  // ATen/core/Generator.h, check_generator
  TORCH_CHECK(
      generator.device().is_mps(),
      "Expected a 'mps' device type for generator but found '",
      generator.device().type(),
      "'");
  uint64_t seed = 0;
  {
    std::lock_guard<std::mutex> lock(generator.mutex());
    seed = static_cast<MetalGenerator*>(generator.unsafeGetGeneratorImpl())->next_seed();
  }
  return at::detail::createCPUGenerator(seed);
}

} // namespace metal
