"""resume-epoch: a loader that goes on is in the epoch that it was in, and a seeded sampler repeats no order of rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.files import write_json
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.introspect import names_in

FILE = "loader_epochs.json"


class ResumeEpoch(Guard):
    """Keeps each loader's count of epochs in a file of its own, hands it to a rest and back, whatever the device."""

    name = "resume-epoch"
    what = (
        "checkpoints of Accelerate forget how many epochs each loader has done, and so does what skip_first_batches"
        " leaves of one: a seeded sampler repeats an order of rows"
    )
    issue = "https://github.com/huggingface/accelerate/issues/3996"
    until = "the oldest supported accelerate stores the loaders' iteration, and hands it on and back"
    patches = {
        # Before others import it by name.
        "accelerate.data_loader:skip_first_batches": "_skipped",
        "accelerate.data_loader:DataLoaderShard.__iter__": "_epoch",
        "accelerate.data_loader:DataLoaderDispatcher.__iter__": "_epoch",
        "accelerate.accelerator:save_accelerator_state": "_saved",
        "accelerate.accelerator:load_accelerator_state": "_loaded",
    }

    def __init__(self) -> None:
        super().__init__()
        self._stores = False

    def applies(self) -> Choice[bool]:
        """Whether the installed save_accelerator_state never names the loader's count."""
        if self._stores:
            return Choice(False, "this accelerate stores how many epochs each loader has done")
        return Choice(True, "checkpoints of this accelerate do not say how many epochs a loader has done")

    def concerns(self, module: ModuleType) -> bool:
        """Whether accelerate's checkpoints lack the epoch; its loaders always count it anew."""
        saving = getattr(module, "save_accelerator_state", None)
        if saving is not None:
            self._stores = "iteration" in names_in(saving)
        return saving is None or not self._stores

    def _skipped(self, stock: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
        from hf_mps.layer.guards.resume import loader_state

        rest = stock(dataloader, num_batches)
        if hasattr(rest, "iteration") and hasattr(dataloader, "iteration"):
            loader_state.link(rest, dataloader, num_batches)
            if rest.iteration != dataloader.iteration:  # accelerate before 1.15
                rest.iteration = dataloader.iteration
                self.acted("the rest of a resumed epoch has the order of rows of that epoch", aloud=False)
        return rest

    def _epoch(self, stock: Callable[..., Iterator[Any]], loader: Any) -> Iterator[Any]:
        return self._counted(stock(loader), loader)

    def _counted(self, batches: Iterator[Any], loader: Any) -> Iterator[Any]:
        yield from batches
        self.safely(self._count, loader)

    def _count(self, loader: Any) -> None:
        from hf_mps.layer.guards.resume import loader_state

        whole = loader_state.source_of(loader)
        if whole.iteration < loader.iteration:
            whole.iteration = loader.iteration
            self.acted("the epoch after a resumed one has an order of rows of its own", aloud=False)

    def _saved(self, stock: Callable[..., Any], folder: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_mps.layer.guards.resume import loader_state

        saved = stock(folder, *args, **kwargs)
        write_json(Path(folder) / FILE, [_epochs(loader) for loader in loader_state.loaders_among(args, kwargs)])
        self.acted(f"checkpoints also hold how many epochs each loader has done, in {FILE}", aloud=False)
        return saved

    def _loaded(self, stock: Callable[..., Any], folder: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_mps.layer.guards.resume import loader_state

        loaded = stock(folder, *args, **kwargs)
        file, loaders = Path(folder) / FILE, loader_state.loaders_among(args, kwargs)
        counts = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        if len(counts) == len(loaders):  # else of another program
            for loader, count in zip(loaders, counts, strict=True):
                loader.iteration = count
        return loaded


def _epochs(loader: Any) -> int:
    """How many epochs a prepared loader has done; one whose last batch is being trained on counts."""
    from hf_mps.layer.guards.resume import loader_state

    active = loader_state.active()
    if active is not None and loader_state.source_of(active) is loader:
        return int(active.iteration) + bool(active.end_of_dataloader)
    return int(loader.iteration)


GUARD = ResumeEpoch()
