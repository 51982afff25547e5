// The operators that the device was called for, as text for the launch rules (hf_mps/metal/operators/calls.py reads it).
#pragma once

#include "device.h"

#include <utility>

namespace metal {

// Whoever counts asks for a record and gives it back; it is kept as long as anybody wants it.
void record_calls(bool wanted);
bool recording();
// How many calls the record has, and from `first` on: every different call's text, and the calls as numbers of those.
int64_t calls_recorded();
std::pair<std::vector<std::string>, std::vector<int32_t>> recorded_calls(int64_t first);
// A call of an operator, while somebody records.
void record(const std::string& name, c10::ArrayRef<c10::IValue> given);
void record(const std::string& text);
// As `launched`, of a call that a kernel from outside computed: `text` is what the record has of it.
void launched_outside(const std::string& name, const std::string& text);

} // namespace metal
