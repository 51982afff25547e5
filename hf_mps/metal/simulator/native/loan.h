// The host's side of the device tensors of one call: over the same bytes, and taken back when the call is over.
#pragma once

#include "device.h"

#include <c10/util/SmallVector.h>

namespace metal {

class Loan {
 public:
  // A CPU tensor that stands for a device tensor; any other tensor stands for itself.
  at::Tensor lend(const at::Tensor& tensor, bool written);
  // Writes come back: an argument that was resized, or that grew, is so for the caller too.
  void settle();
  // The device tensor for a result: the argument that it is, a view of one, or a new one.
  at::Tensor take_back(const at::Tensor& result);

 private:
  struct Lent {
    at::Tensor device;
    at::Tensor host;
    bool written;
  };

  at::Tensor lend_sparse(const at::Tensor& tensor);
  void settle_dense(const Lent& lent);
  void settle_sparse(Lent lent);
  at::Tensor take_back_sparse(const at::Tensor& result);
  c10::Storage storage_for(const at::Tensor& tensor) const;

  c10::SmallVector<Lent, 8> lent_;
};

} // namespace metal
