"""Ends the process with SIGKILL at a chosen moment: a step, or the n-th thing that a checkpoint writes."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any


def kill() -> None:
    """As the kernel does it when memory is short: nothing is cleaned up, nothing is flushed."""
    os.kill(os.getpid(), signal.SIGKILL)


class Killer:
    """Counts steps and writes; `at` is ("step", n), ("write", n) or ("never", 0)."""

    def __init__(self, at: tuple[str, int]) -> None:
        self.kind, self.left = at

    def count(self, kind: str) -> bool:
        """Whether this is the moment."""
        if kind != self.kind:
            return False
        self.left -= 1
        return self.left == 0

    def step(self) -> None:
        """To be called once in each optimizer step."""
        if self.count("step"):
            kill()

    def watch_writes(self) -> None:
        """Kill in the middle of a torch or safetensors file, or before something reaches the disk or is renamed."""
        import accelerate.utils.other
        import safetensors.torch
        import torch
        import transformers.modeling_utils

        stock_torch, stock_tensors = torch.save, safetensors.torch.save_file

        def torch_save(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
            if self.count("write"):
                whole = io.BytesIO()
                stock_torch(value, whole)
                half(Path(file), whole.getvalue())
            stock_torch(value, file, *args, **kwargs)

        def save_file(tensors: Any, file: Any, *args: Any, **kwargs: Any) -> None:
            stock_tensors(tensors, file, *args, **kwargs)
            if self.count("write"):
                half(Path(file), Path(file).read_bytes())

        def half(file: Path, content: bytes) -> None:
            file.write_bytes(content[: len(content) // 2])
            kill()

        torch.save = torch_save
        transformers.modeling_utils.safe_save_file = save_file
        accelerate.utils.other.safe_save_file = save_file
        self._before(os, "fsync")
        self._before(Path, "rename")

    def _before(self, owner: Any, name: str) -> None:
        stock: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.count("write"):
                kill()
            return stock(*args, **kwargs)

        setattr(owner, name, counted)
