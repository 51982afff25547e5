#include "loan.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <c10/core/Layout.h>
#include <c10/util/Exception.h>

namespace metal {
namespace {

using at::Tensor;

at::SparseTensorImpl* sparse(const Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

Tensor sparse_of(const Tensor& indices, const Tensor& values, const Tensor& like) {
  return at::_sparse_coo_tensor_unsafe(indices, values, like.sizes(), values.options().layout(c10::kSparse))
      ._coalesced_(like.is_coalesced());
}

} // namespace

Tensor Loan::lend(const Tensor& tensor, bool written) {
  if (!tensor.defined() || !tensor.device().is_mps()) {
    return tensor;
  }
  auto host = tensor.is_sparse() ? lend_sparse(tensor) : host_view(tensor, storage_for(tensor));
  lent_.push_back({tensor, host, written});
  return host;
}

// A sparse COO tensor has no memory of its own: indices and values are two dense tensors.
Tensor Loan::lend_sparse(const Tensor& tensor) {
  return sparse_of(lend(sparse(tensor)->indices(), false), lend(sparse(tensor)->values(), false), tensor);
}

void Loan::settle() {
  for (size_t i = 0, count = lent_.size(); i < count; ++i) {
    if (lent_[i].written) {
      lent_[i].device.is_sparse() ? settle_sparse(lent_[i]) : settle_dense(lent_[i]);
    }
  }
}

void Loan::settle_dense(const Lent& lent) {
  const auto& [device, host, written] = lent;
  if (host.storage().data() != device.storage().data() || host.storage().nbytes() != device.storage().nbytes()) {
    adopt_into(device.storage(), host.storage());
  }
  if (host.sizes() != device.sizes() || host.strides() != device.strides() ||
      host.storage_offset() != device.storage_offset()) {
    device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }
}

// By value: what is taken back becomes a further entry.
void Loan::settle_sparse(Lent lent) {
  auto* to = sparse(lent.device);
  const auto* from = sparse(lent.host);
  to->raw_resize_(from->sparse_dim(), from->dense_dim(), lent.host.sizes());
  to->set_indices_and_values_unsafe(take_back(from->indices()), take_back(from->values()));
  to->set_coalesced(from->coalesced());
}

Tensor Loan::take_back(const Tensor& result) {
  if (!result.defined()) {
    return result;
  }
  for (const auto& item : lent_) {
    if (item.host.is_same(result)) {
      return item.device;
    }
  }
  if (result.is_sparse()) {
    return take_back_sparse(result);
  }
  for (const auto& item : lent_) {
    if (!item.host.is_sparse() && item.host.storage().is_alias_of(result.storage())) {
      check_dtype(result.scalar_type());
      return device_view_of(item.device, result);
    }
  }
  auto taken = adopt(result);
  lent_.push_back({taken, result, false}); // a second result may lie in the same memory
  return taken;
}

Tensor Loan::take_back_sparse(const Tensor& result) {
  return sparse_of(take_back(sparse(result)->indices()), take_back(sparse(result)->values()), result);
}

// Arguments that share a storage must share its stand-in as well.
c10::Storage Loan::storage_for(const Tensor& tensor) const {
  for (const auto& item : lent_) {
    if (!item.device.is_sparse() && item.device.storage().is_alias_of(tensor.storage())) {
      return item.host.storage();
    }
  }
  return borrow(tensor.storage());
}

} // namespace metal
