"""`torch.UntypedStorage(bytes, device="mps")`, which a wheel built without Metal refuses in its C++ constructor.

torch.load, UntypedStorage.mps() and .to("mps") all make their storage that way.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Let storages be made on the device. Once."""
    import torch

    storage: Any = torch.UntypedStorage
    original = storage.__new__
    if getattr(original, "_hf_mps_makes_mps", False):
        return

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "mps" or len(args) > 1:
            # The C++ constructor takes no `device=None`.
            return original(cls, *args, **kwargs) if device is None else original(cls, *args, device=device, **kwargs)
        content = args[0] if args else kwargs.get("size", 0)
        if isinstance(content, int):
            return torch.empty(content, dtype=torch.uint8, device="mps").untyped_storage()
        return torch.tensor(list(content), dtype=torch.uint8, device="mps").untyped_storage()

    new._hf_mps_makes_mps = True  # type: ignore[attr-defined]
    storage.__new__ = new
