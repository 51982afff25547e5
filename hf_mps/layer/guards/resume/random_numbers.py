"""The states of the generators that a training draws from, taken, put back, and stored. Imports torch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch


@dataclass(frozen=True)
class States:
    """torch's on the CPU, Python's and NumPy's; Metal's and that of a torch.Generator where they were asked for."""

    torch: Any
    python: Any
    numpy: dict[str, Any]
    mps: Any = None
    generator: Any = None

    @classmethod
    def now(cls, *, generator: Any = None, mps: bool = False) -> States:
        """As they are."""
        return cls(
            torch.get_rng_state(),
            random.getstate(),
            numpy.random.get_state(legacy=False),
            torch.mps.get_rng_state() if mps else None,
            None if generator is None else generator.get_state(),
        )

    def put(self, generator: Any = None) -> None:
        """Let them be so again."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        if self.mps is not None:
            torch.mps.set_rng_state(self.mps)
        if generator is not None and self.generator is not None:
            generator.set_state(self.generator)

    def plain(self) -> dict[str, Any]:
        """In types that torch.load reads with weights_only."""
        inner = self.numpy["state"]
        # torch.load with weights_only refuses NumPy's arrays.
        key = torch.from_numpy(inner["key"].astype("int64"))
        return {**vars(self), "numpy": {**self.numpy, "state": {**inner, "key": key}}}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> States:
        """From what `plain` made, whatever device and containers it was loaded to."""
        on_cpu = {name: each.cpu() if isinstance(each, torch.Tensor) else each for name, each in plain.items()}
        version, inner, gauss = plain["python"]
        state = plain["numpy"]["state"]
        key = state["key"].cpu().numpy().astype("uint32")
        python, of_numpy = (version, tuple(inner), gauss), {**plain["numpy"], "state": {**state, "key": key}}
        return cls(on_cpu["torch"], python, of_numpy, on_cpu["mps"], on_cpu["generator"])


def own(file: Path) -> Path:
    """The file of this process: several have one each in a checkpoint, numbered as Trainer's rng_state_0.pth is."""
    from accelerate.state import PartialState

    state = PartialState()
    return file if state.num_processes == 1 else file.with_name(f"{file.stem}_{state.process_index}{file.suffix}")


def save(value: Any, file: Path) -> None:
    """torch.save, whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    torch.save(value, part)
    part.replace(file)
