"""The precision that was measured for a model and a batch on this machine, kept in the user's cache.

A stopwatch says something else under another load, and the precision changes a run's numbers: it is asked once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hf_mps.core import cache
from hf_mps.core.choice import Choice
from hf_mps.core.files import write_json
from hf_mps.metal.device import machine

AGAIN = "kept for this machine and model; to measure again, remove {}"


def conditions(model: Any, shape: str, device: str, *, graphs: bool) -> dict[str, Any]:
    """Return what a trial depends on: chip, threads, PyTorch, the model's class and size, the shape of a batch."""
    return {
        "device": device,
        "chip": machine.chip(device),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "model": type(model).__name__,
        "parameters": sum(each.numel() for each in model.parameters()),
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "batch": shape,
        "graphs": graphs,
    }


def find(asked: Mapping[str, Any], allowed: tuple[str, ...]) -> tuple[Choice[str], str] | None:
    """Return the precision that was measured under these conditions, and why steps could not be recorded; else None."""
    file = _file(asked)
    try:
        said = json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
    except (OSError, ValueError):
        return None
    if said.get("asked") != asked or said.get("value") not in allowed:
        return None
    return Choice(said["value"], f"{said['reason']}; {AGAIN.format(file)}"), str(said["without"])


def keep(asked: Mapping[str, Any], measured: Choice[str], without: str) -> None:
    """Keep what was measured; where no file can be written the next run measures again."""
    file = _file(asked)
    if file is not None:
        with suppress(OSError):
            write_json(file, {"asked": asked, "value": measured.value, "reason": measured.reason, "without": without})


def folder() -> Path | None:
    """Where what was measured is kept; None where the user has no home."""
    return cache.home("precision")


def _file(asked: Mapping[str, Any]) -> Path | None:
    name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    return None if (place := folder()) is None else place / f"{name}.json"
