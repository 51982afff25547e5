"""A saved model's device and the type of its weights, with which predict, evaluate and chat begin."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_mps.core import settings, status
from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError
from hf_mps.finetune.features.machine import expected_operators
from hf_mps.finetune.run import failures
from hf_mps.finetune.run.logging import no_bars
from hf_mps.finetune.run.stages import choose_device
from hf_mps.layer.activation import activate
from hf_mps.metal.device import precision
from hf_mps.tools.saved.run import Adapter, SavedRun

# Types of weights as configurations name them.
HALVES = {"float16": "float16", "bfloat16": "bfloat16", "torch.float16": "float16", "torch.bfloat16": "bfloat16"}


@contextmanager
def on_device(run: SavedRun) -> Iterator[tuple[SavedRun, Choice[str], Path, dict[str, Choice[str]]]]:
    """Choose the device of `run` and the type of its weights, and yield both with a temporary folder.

    It turns off the libraries' bars, and turns a failure of the machine into one line (RunError).
    """
    settings.refuse_unknown()
    with status.shown("loading PyTorch …"), no_bars(), tempfile.TemporaryDirectory(prefix="hf-mps-saved-") as folder:
        activate.activate()
        device = choose_device(run.recipe)
        weights = weights_of(run, device.value)
        run = run.in_dtype(weights.value)
        shown = {"weights": weights} if weights.value != "float32" else {}
        with expected_operators(run.recipe.fallback):
            try:
                yield run, device, Path(folder), shown
            except RunError:
                raise
            except Exception as error:
                if (words := failures.describe(error)) is None:
                    raise
                way_on = "; next: a smaller --batch" if words.startswith("out of memory") else ""
                raise RunError(f"{words}{way_on}") from error


def weights_of(run: SavedRun, device: str) -> Choice[str]:
    """Return the type of the weights in memory: that of the run, or of the files where `device` computes in it."""
    if run.results is not None:
        return Choice(run.recipe.weights, "weights in the recipe of its run")
    config = (run.checkpoint.base if isinstance(run.checkpoint, Adapter) else run.checkpoint).stored_config()
    if (stored := HALVES.get(str(config.get("dtype") or config.get("torch_dtype")))) is None:
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
