"""Guards of random numbers in a checkpoint.

The states of the generators that a training draws from, taken, put back, and stored. Imports torch.
resume-rng: checkpoints of Trainer and Accelerate carry the device's random numbers; a resumed run is the same.
lightning-rng: Lightning's checkpoints carry the random numbers, so that a resumed run is the unbroken one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy
import torch

from hf_mps.core.choice import Choice
from hf_mps.core.patching import LIGHTNING, Patch, in_lightning
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.introspect import names_in

if TYPE_CHECKING:
    from hf_mps.layer.guards.resume.batches import LoaderState


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
        from hf_mps.layer.guards.resume import batches

        saved = stock(output_dir, *args, **kwargs)
        if batches.on_metal():
            self._save(Path(output_dir))
        return saved

    def _accelerator_loads(self, stock: Callable[..., Any], input_dir: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_mps.layer.guards.resume import batches

        loaded = stock(input_dir, *args, **kwargs)
        if batches.on_metal():
            self._load(Path(input_dir))
        return loaded

    def _save(self, folder: Path) -> None:
        save(torch.mps.get_rng_state(), own(folder / FILE))
        self.acted(f"checkpoints also hold the device's random numbers, in {FILE}", aloud=False)

    def _load(self, folder: Path) -> None:
        file = own(folder / FILE)
        if file.is_file():
            torch.mps.set_rng_state(torch.load(file, weights_only=True, map_location="cpu"))
        else:
            self.acted(
                f"{folder} holds no {file.name}: the resumed run draws other random numbers than an unbroken one"
            )


RESUME_RNG = ResumeRng()


KEY, LOADERS = "hf_mps_random_states", "hf_mps_loaders"


class LightningRng(Guard):
    """Puts the states of the device, of torch, NumPy and Python into the checkpoint's dictionary, and takes them out.

    Also where the loaders are in their epoch, which Lightning begins anew unless they keep their own place.
    """

    name = "lightning-rng"
    what = (
        "Lightning's checkpoints hold no random states and no place in an epoch, so a resumed run shuffles and drops"
        " otherwise, and sees other rows"
    )
    issue = "https://github.com/Lightning-AI/pytorch-lightning/issues/17543"
    until = "Lightning saves the random states, those of mps too"
    patches = {
        **in_lightning(
            {
                "trainer.connectors.checkpoint_connector:_CheckpointConnector.dump_checkpoint": "_dump",
                "trainer.connectors.checkpoint_connector:_CheckpointConnector.restore_training_state": "_restore",
                "loops.fetchers:_DataFetcher.setup": "_epoch",
            }
        ),
        "torch.utils.data:DataLoader.__iter__": Patch(
            "_begun", after=tuple(f"{package}.loops.fetchers" for package in LIGHTNING)
        ),
    }

    def __init__(self) -> None:
        super().__init__()
        self._saves = False
        self._waiting: list[LoaderState | None] = []  # of a checkpoint that was read, for the loaders of its epoch

    def applies(self) -> Choice[bool]:
        """Whether Lightning's function that makes a checkpoint names no random state."""
        if self._saves:
            return Choice(False, "this Lightning saves random states itself")
        return Choice(True, "dump_checkpoint of this Lightning saves no random state")

    def concerns(self, module: ModuleType) -> bool:
        """Whether Lightning's checkpoints hold no random states."""
        connector = getattr(module, "_CheckpointConnector", None)
        if connector is not None:
            self._saves = any("rng" in word for word in connector.dump_checkpoint.__code__.co_names)
        return connector is None or not self._saves

    def _epoch(self, stock: Any, fetcher: Any, combined_loader: Any) -> None:
        from torch.utils.data import DataLoader

        from hf_mps.layer.guards.resume import batches

        stock(fetcher, combined_loader)
        waiting, self._waiting = self._waiting, []
        loaders = [each for each in combined_loader.flattened if type(each) is DataLoader]
        for number, loader in enumerate(loaders):
            batches.notes(loader).replay = waiting[number] if len(waiting) == len(loaders) else None

    def _begun(self, stock: Any, loader: Any) -> Any:
        from hf_mps.layer.guards.resume import batches

        return batches.begin(stock, loader)

    def _dump(self, stock: Any, connector: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint = stock(connector, *args, **kwargs)
        if _on_metal(connector) and "optimizer_states" in checkpoint:  # one of weights alone resumes nothing
            # Into the checkpoint that Lightning makes; one that was read keeps them, and Lightning reads past them.
            checkpoint[KEY] = States.now(mps=True).plain()
            checkpoint[LOADERS] = [replay and replay.store() for replay in _places(connector.trainer)]
            self.acted(f"checkpoints also hold the random states, as {KEY}", aloud=False)
        return checkpoint

    def _restore(self, stock: Any, connector: Any) -> None:
        from hf_mps.layer.guards.resume.batches import LoaderState

        stock(connector)
        checkpoint = connector._loaded_checkpoint
        if not checkpoint or not _on_metal(connector) or connector.trainer.state.fn != "fit":
            return
        if KEY in checkpoint:
            States.of(checkpoint[KEY]).put()
            self._waiting = [stored and LoaderState.of(stored) for stored in checkpoint.get(LOADERS, [])]
        else:
            self.acted("the checkpoint holds no random states: the resumed run draws others than an unbroken one")


def _places(trainer: Any) -> list[LoaderState | None]:
    """Where the loaders of an epoch that is not at its end are."""
    from torch.utils.data import DataLoader

    from hf_mps.layer.guards.resume import batches

    loop = trainer.fit_loop
    done = loop.epoch_loop.batch_progress.current.ready
    if loop._combined_loader is None or not 0 < done < loop.max_batches:
        return []
    return [batches.capture(each, done) for each in loop._combined_loader.flattened if type(each) is DataLoader]


def _on_metal(connector: Any) -> bool:
    return str(connector.trainer.strategy.root_device).partition(":")[0] == "mps"


LIGHTNING_RNG = LightningRng()
