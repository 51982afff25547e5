"""torch.mps.Stream on the simulated device, for the releases of PyTorch that have it: 2.15 and later."""

from __future__ import annotations

import importlib
from typing import Any

POOL = 32
"""Streams beside the default one, which is number 0 (ATen/mps/MPSStream.h)."""


def install() -> None:
    """Give torch._C what a wheel with Metal has for streams, and have torch.mps.streams define its class from that."""
    import torch

    streams: Any = getattr(torch.mps, "streams", None)
    if streams is None:
        return
    core: Any = torch._C
    core._MPSStreamBase = _base()
    core._mps_getCurrentStream = _current
    core._mps_setStream = torch.accelerator.set_stream
    # Without Metal it derives its class from a placeholder that cannot be instantiated.
    importlib.reload(streams)
    for name in streams.__all__:
        setattr(torch.mps, name, getattr(streams, name))


def _base() -> type:
    import torch

    class _MPSStreamBase(torch.Stream):
        def __new__(cls, *, stream_id: int = -1) -> Any:
            if stream_id == -1:
                return super().__new__(cls, device="mps")
            if stream_id not in range(POOL + 1):
                raise RuntimeError(f"stream_id={stream_id}")  # as in MPSStream.mm, getStreamByID
            kind = torch.accelerator.current_stream().device_type
            return super().__new__(cls, stream_id=stream_id, device_index=0, device_type=kind)

        def synchronize(self) -> None:
            torch.mps.synchronize()

    return _MPSStreamBase


def _current() -> Any:
    import torch

    core: Any = torch._C
    return core._MPSStreamBase(stream_id=torch.accelerator.current_stream().stream_id)
