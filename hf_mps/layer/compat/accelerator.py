"""Accelerator(logging_dir=…), accelerator.use_fp16 and DistributedType.TPU.

Replaced by `project_dir` (0.20); `use_fp16` went with 1.0, TPU became XLA with 0.27. Source: the signatures in the
releases 0.12, 0.20, 0.27, 0.34 and 1.10. Needless, name by name, where Accelerator
has the argument or the attribute.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from hf_mps.core.notices import print_notice
from hf_mps.core.patching import MISSING, Give, Put


def _use_fp16(accelerator: Any) -> bool:
    """accelerator.use_fp16, a property until accelerate 1.0."""
    print_notice('accelerator.use_fp16 is gone from accelerate 1; in its place: accelerator.mixed_precision == "fp16"')
    return bool(accelerator.mixed_precision == "fp16")


def _init(stock: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    if "logging_dir" in kwargs and "logging_dir" not in inspect.signature(stock).parameters:
        folder = kwargs.pop("logging_dir")
        given = kwargs.get("project_config") is not None or kwargs.get("project_dir") is not None
        becomes = "dropped, a project is given too" if given else "project_dir takes its place"
        print_notice(f"Accelerator(logging_dir={folder!r}): {becomes}")
        kwargs |= {} if given else {"project_dir": folder}
    stock(self, *args, **kwargs)


def _tpu(stock: Any) -> Any:
    """Return today's member under its older name, listed nowhere; MISSING where there is neither."""
    from accelerate.accelerator import DistributedType

    return getattr(DistributedType, "XLA", MISSING) if stock is MISSING else stock


patches = {
    "accelerate.accelerator:Accelerator.__init__": _init,
    "accelerate.accelerator:DistributedType.TPU": Put(_tpu, optional=True),
    "accelerate.accelerator:Accelerator.use_fp16": Give(property(_use_fp16)),
    "accelerate.accelerator:AcceleratorState.use_fp16": Give(property(_use_fp16)),
}
