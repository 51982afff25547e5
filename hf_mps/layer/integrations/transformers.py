"""transformers' TrainingArguments (5 and up), and with it every Trainer, follows HF_MPS_DEVICE.

What is known here is training_args.py: `use_cpu` decides the device, the precision that is allowed and pinned memory;
everything else asks is_torch_mps_available, which asks torch once and keeps the answer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_mps.core.notices import print_notice
from hf_mps.core.patching import Put
from hf_mps.metal.device.choice import metal, switch

REASON = "TrainingArguments and Trainer follow HF_MPS_DEVICE, and Accelerate's CPU settings where it is unset"


def concerns(training_args: ModuleType) -> bool:
    """Always; what transformers asked before this layer was on, it asks again."""
    _forget_answers()
    return True


patches = {
    "transformers.training_args:TrainingArguments.__post_init__": "_post_init",
    "transformers.integrations.sdpa_attention:_is_torch_mps_available": Put(
        lambda stock: metal().value,  # decided while that module was imported, maybe before this layer was on
        after="transformers.training_args",
        optional=True,
        where=lambda: "transformers.integrations.sdpa_attention" in sys.modules,
    ),
}


def _post_init(stock: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    device_type = switch()
    if device_type is None:
        from accelerate.utils import parse_flag_from_env

        # The environment variable that puts Accelerate on the CPU, with its value.
        asked = "ACCELERATE_TORCH_DEVICE=cpu" if os.environ.get("ACCELERATE_TORCH_DEVICE") == "cpu" else ""
        if parse_flag_from_env("ACCELERATE_USE_CPU"):
            asked = f"ACCELERATE_USE_CPU={os.environ['ACCELERATE_USE_CPU']}"
        if asked and not self.use_cpu:
            # transformers 5 leaves TrainingArguments on the GPU then, while its Accelerator goes to the CPU.
            print_notice(f"{asked} puts Accelerate on the CPU; TrainingArguments follows it with use_cpu=True")
            # In the object that is being made, as all that decides the device reads this argument.
            self.use_cpu = True
    else:
        if device_type != "cpu" and self.use_cpu:
            print_notice(f"HF_MPS_DEVICE={device_type} wins over use_cpu=True")
        self.use_cpu = device_type == "cpu"
        _forget_answers()
    stock(self, *args, **kwargs)


def _forget_answers() -> None:
    """Make transformers ask torch again: somebody may have asked before this layer was on."""
    questions = sys.modules["transformers.utils.import_utils"]
    for name in ("is_torch_mps_available", "is_torch_bf16_gpu_available"):
        getattr(getattr(questions, name, None), "cache_clear", lambda: None)()
