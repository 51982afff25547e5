"""A saved model on its device, with what was chosen for it: what predict and evaluate begin with."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_mps.core import settings, status
from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError
from hf_mps.finetune.run import failures
from hf_mps.finetune.run.stages import choose_device
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.tools.saved.adapter import Adapter
from hf_mps.tools.saved.run import SavedRun

# What a file may say of its weights, and the names of the same.
HALVES = {"float16": "float16", "bfloat16": "bfloat16", "torch.float16": "float16", "torch.bfloat16": "bfloat16"}


@dataclass(frozen=True)
class Ready:
    """A model that answers: the run, its `device`, the task's `answering` and its `trainer`, and all `choices`."""

    run: SavedRun
    device: Choice[str]
    answering: Answering
    trainer: Any
    choices: Mapping[str, Choice[Any]]


@contextmanager
def answering(run: SavedRun, batch: int | None = None) -> Iterator[Ready]:
    """Load the model of `run` onto the device that hf_mps chooses, ready to answer `batch` rows at once.

    Prints a line about it on stderr. Raises UserError for a model that cannot be used, RunError for a failure of the
    machine.
    """
    with on_device(run) as (run, device, folder, weights), status.shown("loading the model …"):
        from hf_mps.finetune.run import measuring

        made = run.module.answer(run.to_use, run.checkpoint, run.chosen, device.value)
        trainer, chosen = measuring.trainer(made, run.to_use, device, folder, run.chosen, batch)
        say(run, device, {**chosen, **weights})
        status.over()
        yield Ready(run, device, made, trainer, {**made.choices, **chosen, **weights})


@contextmanager
def on_device(run: SavedRun) -> Iterator[tuple[SavedRun, Choice[str], Path, dict[str, Choice[str]]]]:
    """Choose the device of `run` and the type of its weights, and give both with a temporary folder.

    Libraries' bars are off, and a failure of the machine inside ends in one line (RunError).
    """
    from hf_mps.finetune.features.machine import expected_operators
    from hf_mps.finetune.run.logging import no_bars
    from hf_mps.layer.activation import activate

    settings.refuse_unknown()
    with status.shown("loading PyTorch …"), no_bars(), tempfile.TemporaryDirectory(prefix="hf-mps-saved-") as folder:
        activate.activate()
        device = choose_device(run.recipe)
        weights = weights_of(run, device.value)
        run = run.in_dtype(weights.value)
        shown = {"weights": weights} if weights.value != "float32" else {}
        with expected_operators(run.recipe.fallback), _failures_in_one_line():
            yield run, device, Path(folder), shown


def weights_of(run: SavedRun, device: str) -> Choice[str]:
    """Return the type of the weights in memory: that of the run, or of the files where `device` computes in it."""
    from hf_mps.metal.device import precision

    if run.results is not None:
        return Choice(run.recipe.weights, "weights in the recipe of its run")
    config = (run.checkpoint.base if isinstance(run.checkpoint, Adapter) else run.checkpoint).stored_config()
    stored = HALVES.get(str(config.get("dtype") or config.get("torch_dtype")))
    if stored is None:
        return Choice("float32", "as its files have them")
    usable = precision.dtypes(device)[stored]
    if device == "cpu" or not usable.value:
        why = "the CPU's own precision" if device == "cpu" else usable.reason
        return Choice("float32", f"its files have {stored}; {why}")
    return Choice(stored, f"as its files have them; {usable.reason}")


def say(run: SavedRun, device: Choice[str], choices: Mapping[str, Choice[Any]]) -> None:
    """Print the task, the device and what else was chosen, each with its reason, on stderr."""
    shown = {"task": run.task, "device": device, **choices}
    words = "; ".join(f"{name} {choice}" for name, choice in shown.items())
    print(f"hf-mps: {run.where}: {words}", file=sys.stderr, flush=True)


@contextmanager
def _failures_in_one_line() -> Iterator[None]:
    """Turn a failure of the machine into one line (RunError)."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        words = failures.describe(error)
        if words is None:
            raise
        way_on = "; next: a smaller --batch" if words.startswith("out of memory") else ""
        raise RunError(f"{words}{way_on}") from error
