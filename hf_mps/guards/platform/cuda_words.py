"""cuda-words: autocast switched off in CUDA's name is off on Metal; where a script gets none, a line says so."""

from __future__ import annotations

from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.guards.base import Guard

ASKED = 'torch.autocast("cuda") does nothing on mps, and this computes in the dtype of its inputs'
SCALED = 'GradScaler("cuda") scales nothing on mps'


class CudaWords(Guard):
    """Looks at autocast, `custom_fwd`, `custom_bwd` and GradScaler of a script that names CUDA where there is none.

    What narrows an autocast that the script has on mps is done there, as it would be on CUDA: `enabled=False`, the
    dtypes of `custom_fwd`, the state that `custom_bwd` brings back. Without an autocast on mps that changes nothing.

    What would turn mixed precision on is told and not done. The script has been right so far, in float32; float16
    would change its numbers, and needs a GradScaler that works. One for CUDA, which PyTorch makes and disables, stays
    disabled: gradients of float32 need none, and a scaler waits for the device at each step. Where autocast on mps is
    float16, they do need one, so that is told as well.

    `torch.is_autocast_enabled()` goes on answering for CUDA: libraries that ask it then take CUDA's dtype.
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
        mistaken = device_type == "cuda" and not _cuda()
        if mistaken and not enabled:
            self.acted('autocast("cuda", enabled=False) switches off the one for mps', aloud=False)
            device_type = "mps"
        stock(mode, device_type, dtype, enabled, *args, **kwargs)
        if mistaken and enabled:
            asked = f"torch.{str(dtype).removeprefix('torch.')}" if dtype is not None else "torch.bfloat16"
            self._tell(f'{ASKED}; next: torch.autocast("mps", dtype={asked}), or device.type in place of "cuda"')

    def _decorates(self, stock: Any, function: Any = None, *, device_type: Any, **kwargs: Any) -> Any:
        if device_type == "cuda" and not _cuda():  # asks nothing of the device: modules do this when they are imported
            self.acted("custom_fwd and custom_bwd of CUDA go by the autocast for mps", aloud=False)
            device_type = "mps"
        return stock(function, device_type=device_type, **kwargs)

    def _scaler(self, stock: Any, scaler: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        stock(scaler, device, *args, **kwargs)
        asked = kwargs.get("enabled", args[4] if len(args) > 4 else True)
        if device == "cuda" and asked and not scaler.is_enabled():
            self._tell(f'{SCALED}; next: torch.amp.GradScaler("mps") where autocast on mps is float16, else none')

    def _tell(self, line: str) -> None:
        from hf_mps.device.choice import metal

        if metal().value:  # else the script computes on the CPU
            self.acted(line)


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


GUARD = CudaWords()
