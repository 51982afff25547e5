"""Dropout as one kernel forward and one backward, where stock draws a mask, divides it and multiplies by it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from hf_mps.core.patching import OriginalCall
from hf_mps.core.releases import torch_release
from hf_mps.layer.fused_step.autograd_kernels import AutogradKernel
from hf_mps.layer.fused_step.switch import Part

STOCK_FUSES = (2, 15)
"""The release whose own dropout takes that kernel on Metal (pytorch#195011)."""


class FusedDropout(Part):
    """Sends `aten::dropout` (F.dropout, nn.Dropout, attention's own) to `native_dropout`, a kernel of Metal's.

    ATen/native/Dropout.cpp (`is_fused_kernel_acceptable`) does so on CUDA and XPU, and from 2.15 on Metal. The kernel
    draws from the device's generator, other numbers than the pieces do: with the same seed the masks are others, and
    as likely. They follow from the generator's state, so that resumed and checkpointed trainings repeat them. It can go
    when the oldest supported torch is 2.15.
    """

    name = "fused-dropout"
    what = "dropout in one kernel, which draws other masks from the same seed"
    why = "the price of a small launch is the host's, and dropout has four in pieces"
    patches = {"aten::dropout": AutogradKernel("_dropped", when="concerns_call")}

    def pays(self, device_type: str) -> str:
        """Return the reason where the release's own dropout does not take the kernel by itself."""
        return super().pays(device_type) if torch_release() < STOCK_FUSES else ""

    def words(self, model: Any, device_type: str) -> str:
        """Nothing for a model without dropout."""
        layers = any(isinstance(each, torch.nn.Dropout) and each.p > 0 for each in model.modules())
        config = vars(model.config) if getattr(model, "config", None) is not None else {}
        rates = (value for name, value in config.items() if "drop" in name and isinstance(value, float))
        return self.what if layers or any(rate > 0 for rate in rates) else ""

    def concerns_call(self, given: Tensor, p: float, train: bool) -> bool:
        """Return whether stock would draw a mask, for a tensor whose order in memory the kernel keeps."""
        draws = train and 0 < p < 1 and given.device.type in self.devices
        return draws and given.is_floating_point() and given.numel() > 0 and given.is_contiguous()

    def _dropped(self, stock: OriginalCall, given: Tensor, p: float, train: bool) -> Tensor:
        self.acts()
        dropped, _ = stock.foreign(torch.native_dropout, given, p, True)
        return cast(Tensor, dropped)


FUSED_DROPOUT = FusedDropout()
