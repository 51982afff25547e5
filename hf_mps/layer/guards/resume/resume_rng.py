"""resume-rng: checkpoints of Trainer and Accelerate carry the device's random numbers; a resumed run is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.introspect import names_in

FILE = "mps_rng_state.pth"


class ResumeRng(Guard):
    """Writes a file of its own beside theirs, and reads it where they read theirs."""

    name = "resume-rng"
    what = "checkpoints leave out the device's random numbers, so a resumed run draws others for its dropout"
    issue = "transformers/trainer.py _save_rng_state, accelerate/checkpointing.py save_accelerator_state"
    until = "the oldest supported transformers and accelerate save torch.mps.get_rng_state()"
    patches = {
        "transformers.trainer:Trainer._save_rng_state": "_trainer_saves",
        "transformers.trainer:Trainer._load_rng_state": "_trainer_loads",
        "accelerate.accelerator:save_accelerator_state": "_accelerator_saves",
        "accelerate.accelerator:load_accelerator_state": "_accelerator_loads",
    }

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, bool] = {}

    def applies(self) -> Choice[bool]:
        """Whether the installed libraries leave the device's generator out, by the names that their functions use."""
        lacking = [library for library, saves in self._found.items() if not saves]
        if lacking:
            return Choice(True, f"{' and '.join(lacking)} leave the mps generator out of their checkpoints")
        return Choice(False, f"{' and '.join(self._found)} save the mps generator themselves")

    def concerns(self, module: ModuleType) -> bool:
        """Whether the library's function that saves random states names none of mps."""
        saving = module.Trainer._save_rng_state if hasattr(module, "Trainer") else module.save_accelerator_state
        library = module.__name__.partition(".")[0]
        self._found[library] = any("mps" in word for word in names_in(saving))
        self._verdict = None
        return not self._found[library]

    def _trainer_saves(self, stock: Callable[..., None], trainer: Any, output_dir: str) -> None:
        stock(trainer, output_dir)
        if trainer.args.device.type == "mps":
            self._save(Path(output_dir))

    def _trainer_loads(self, stock: Callable[..., None], trainer: Any, checkpoint: str | None) -> None:
        stock(trainer, checkpoint)
        if checkpoint is not None and trainer.args.device.type == "mps":
            self._load(Path(checkpoint))

    def _accelerator_saves(self, stock: Callable[..., Any], output_dir: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_mps.layer.guards.resume import loader_state

        saved = stock(output_dir, *args, **kwargs)
        if loader_state.on_metal():
            self._save(Path(output_dir))
        return saved

    def _accelerator_loads(self, stock: Callable[..., Any], input_dir: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_mps.layer.guards.resume import loader_state

        loaded = stock(input_dir, *args, **kwargs)
        if loader_state.on_metal():
            self._load(Path(input_dir))
        return loaded

    def _save(self, folder: Path) -> None:
        import torch

        from hf_mps.layer.guards.resume import rng_state

        rng_state.save(torch.mps.get_rng_state(), rng_state.own(folder / FILE))
        self.acted(f"checkpoints also hold the device's random numbers, in {FILE}", aloud=False)

    def _load(self, folder: Path) -> None:
        import torch

        from hf_mps.layer.guards.resume import rng_state

        file = rng_state.own(folder / FILE)
        if file.is_file():
            torch.mps.set_rng_state(torch.load(file, weights_only=True, map_location="cpu"))
        else:
            self.acted(
                f"{folder} holds no {file.name}: the resumed run draws other random numbers than an unbroken one"
            )


GUARD = ResumeRng()
