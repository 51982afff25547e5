"""cuda-words: autocast switched off in CUDA's name is off on Metal; where a script gets none, a line says so."""

from __future__ import annotations

from typing import Any

from hf_mps.core import notices
from hf_mps.core.choice import Choice
from hf_mps.layer.guards.base import Guard

ASKED = 'torch.autocast("cuda") does nothing on mps, and this computes in the dtype of its inputs'
SCALED = 'GradScaler("cuda") scales nothing on mps'


class CudaWords(Guard):
    """Handles autocast, `custom_fwd`, `custom_bwd` and GradScaler in a script that names CUDA where there is none.

    Calls that limit autocast are applied to the script's autocast on mps, as they would be on CUDA: `enabled=False`,
    the dtypes of `custom_fwd`, the state that `custom_bwd` restores. Without autocast on mps they change nothing.

    Calls that would enable mixed precision are reported, in place of PyTorch's warning, but not applied. Such a script
    trains correctly in float32 today; float16 would change its numbers and need a working GradScaler. A GradScaler for
    CUDA stays disabled, as PyTorch makes it: float32 gradients need none, and a scaler waits for the device at every
    step. With float16 autocast on mps they do need one, which the notice says.

    `torch.is_autocast_enabled()` keeps answering for CUDA, because libraries that ask it go on to use CUDA's dtype.
    """

    name = "cuda-words"
    what = (
        'autocast("cuda") and GradScaler("cuda") do nothing on mps, and autocast("cuda", enabled=False) leaves an'
        " autocast for mps on: what a model computes in float32 on purpose is in half precision"
    )
    issue = "https://github.com/Stability-AI/stable-audio-3/pull/68"
    until = "PyTorch refuses autocast for a device that is not there"
    patches = {
        "torch.amp.autocast_mode:autocast.__init__": "_made",
        "torch.amp:custom_fwd": "_decorates",
        "torch.amp:custom_bwd": "_decorates",
        "torch.amp:GradScaler.__init__": "_scaler",
    }

    def applies(self) -> Choice[bool]:
        """Whether there is no CUDA."""
        if _cuda():
            return Choice(False, "there is CUDA")
        return Choice(True, "there is no CUDA: what is asked of its autocast does nothing")

    def _made(
        self, stock: Any, mode: Any, device_type: Any, dtype: Any = None, enabled: Any = True, *args: Any, **kwargs: Any
    ) -> None:
        arguments = (device_type, dtype, enabled, *args)
        if device_type != "cuda" or _cuda():
            stock(mode, *arguments, **kwargs)
        elif enabled:
            asked = f"torch.{str(dtype).removeprefix('torch.')}" if dtype is not None else "torch.bfloat16"
            line = f'{ASKED}; next: torch.autocast("mps", dtype={asked}), or device.type in place of "cuda"'
            self._tell(line, stock, mode, *arguments, **kwargs)
        else:
            self.acted('autocast("cuda", enabled=False) switches off the one for mps', aloud=False)
            stock(mode, "mps", *arguments[1:], **kwargs)

    def _decorates(self, stock: Any, function: Any = None, *, device_type: Any, **kwargs: Any) -> Any:
        if device_type == "cuda" and not _cuda():  # asks nothing of the device: modules do this when they are imported
            self.acted("custom_fwd and custom_bwd of CUDA go by the autocast for mps", aloud=False)
            device_type = "mps"
        return stock(function, device_type=device_type, **kwargs)

    def _scaler(self, stock: Any, scaler: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        asked = kwargs.get("enabled", args[4] if len(args) > 4 else True)
        if device != "cuda" or not asked or _cuda():
            stock(scaler, device, *args, **kwargs)
        else:
            line = f'{SCALED}; next: torch.amp.GradScaler("mps") where autocast on mps is float16, else none'
            self._tell(line, stock, scaler, device, *args, **kwargs)

    def _tell(self, line: str, stock: Any, *args: Any, **kwargs: Any) -> None:
        """Say it in place of PyTorch's warning, which would name a line of this package; on the CPU that stays."""
        from hf_mps.metal.device.choice import metal

        if not metal().value:
            stock(*args, **kwargs)
            return
        with notices.ignoring(UserWarning, "CUDA is not available|torch.cuda.amp.GradScaler is enabled"):
            stock(*args, **kwargs)
        self.acted(line)


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


GUARD = CudaWords()
