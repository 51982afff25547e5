// Numbers that a kernel misreads, and results that it does not write: what misread.cpp knows.
#pragma once

#include "device.h"

namespace metal {

struct Misreads {
  std::atomic<bool> large_pad{false}; // padding more than four dimensions loses what it pads
  std::atomic<bool> lerp_weight{false}; // lerp reads its weight's bytes in the dtype of the tensors
  std::atomic<bool> lone_scans{false}; // a scan over a dimension of one row writes as many columns as its stride says
  std::atomic<bool> scalar_views{false}; // a number in a CPU tensor is read at the beginning of its storage
  std::atomic<bool> index_add_gaps{false}; // index_add writes no result that is not contiguous from its storage's start
};

extern Misreads misreads;

// The number on the CPU that the operator called `name` ("aten::add") reads in place of `number`.
at::Tensor misread_number(const std::string& name, const at::Tensor& number);
// Runs index_add by `compute`; a result that Metal would not write stays as it was.
void index_add_into_gaps(const c10::OperatorHandle& op, torch::jit::Stack* stack, Inside compute);

} // namespace metal
