#include "calls.h"

#include <c10/core/ScalarType.h>

#include <mutex>
#include <unordered_map>

namespace metal {
namespace {

using at::Tensor;

std::atomic<int> wanting{0};
std::mutex lock;
std::unordered_map<std::string, int32_t> numbers;
std::vector<std::string> texts;
std::vector<int32_t> sequence;

template <typename List, typename One>
std::string listed(const List& list, const One& one) {
  std::string found = "[";
  for (const auto& each : list) {
    found += (found.size() > 1 ? "," : "") + one(each);
  }
  return found + "]";
}

std::string whole(int64_t number) {
  return std::to_string(number);
}

// As `hf_mps.metal.operators.calls._is_dense`.
bool dense(const Tensor& tensor) {
  return tensor.layout() != c10::kStrided || tensor.is_contiguous() ||
      (tensor.dim() == 4 && tensor.is_contiguous(at::MemoryFormat::ChannelsLast));
}

void add(std::vector<std::string>& inputs, const Tensor& tensor) {
  if (!tensor.defined()) {
    return;
  }
  const std::string dtype(c10::getDtypeNames(tensor.scalar_type()).first);
  inputs.push_back(
      "[\"" + dtype + "\"," + listed(tensor.sizes(), whole) + (dense(tensor) ? ",true,\"" : ",false,\"") +
      c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true) + "\"]");
}

std::string text_of(const std::string& name, c10::ArrayRef<c10::IValue> given) {
  std::vector<std::string> inputs, lists, arguments;
  for (const auto& value : given) {
    std::string number = "null";
    if (value.isTensor()) {
      add(inputs, value.toTensor());
    } else if (value.isTensorList()) {
      const auto tensors = value.toTensorVector();
      for (const auto& each : tensors) {
        add(inputs, each);
      }
      lists.push_back(std::to_string(tensors.size()));
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor> each : value.toOptionalTensorList()) {
        add(inputs, each.value_or(Tensor()));
      }
    } else if (value.isInt() || value.isBool()) {
      number = std::to_string(value.isBool() ? int64_t(value.toBool()) : value.toInt());
    } else if (value.isIntList()) {
      number = listed(value.toIntVector(), whole);
    } else if (value.isBoolList()) {
      number = listed(value.toBoolList().vec(), [](bool each) { return std::string(each ? "1" : "0"); });
    }
    arguments.push_back(number);
  }
  const auto same = [](const std::string& text) { return text; };
  return "[\"" + name + "\"," + listed(inputs, same) + "," + listed(lists, same) + "," + listed(arguments, same) + "]";
}

} // namespace

void record_calls(bool wanted) {
  const std::lock_guard<std::mutex> guard(lock);
  wanting += wanted ? 1 : -1;
  if (wanting == 0) {
    numbers.clear();
    texts.clear();
    sequence.clear();
  }
}

bool recording() {
  return wanting.load(std::memory_order_relaxed) > 0;
}

int64_t calls_recorded() {
  const std::lock_guard<std::mutex> guard(lock);
  return static_cast<int64_t>(sequence.size());
}

std::pair<std::vector<std::string>, std::vector<int32_t>> recorded_calls(int64_t first) {
  const std::lock_guard<std::mutex> guard(lock);
  return {texts, {sequence.begin() + first, sequence.end()}};
}

void record(const std::string& name, c10::ArrayRef<c10::IValue> given) {
  if (recording()) {
    record(text_of(name, given));
  }
}

void record(const std::string& text) {
  const std::lock_guard<std::mutex> guard(lock);
  const auto [found, fresh] = numbers.try_emplace(text, static_cast<int32_t>(texts.size()));
  if (fresh) {
    texts.push_back(text);
  }
  sequence.push_back(found->second);
}

} // namespace metal
