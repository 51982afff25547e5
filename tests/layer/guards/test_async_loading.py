"""Weights that change their dtype on their way to Metal are converted by one thread; all others load as ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, core_model_loading

from hf_mps.layer import guards
from tests.layer.guards import loops


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The names of the threads that have loaded a weight, "MainThread" for the caller's."""
    stock: Any = core_model_loading._materialize_copy
    found: set[str] = set()

    def materialize(*args: Any, **kwargs: Any) -> Any:
        found.add(threading.current_thread().name)
        return stock(*args, **kwargs)

    monkeypatch.setattr(core_model_loading, "_materialize_copy", materialize)
    yield found
    for each in threading.enumerate():  # transformers does not wait for them
        if each.name.startswith("ThreadPoolExecutor"):
            each.join()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    loops.bert().to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, dtype: torch.dtype, device: str) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, device_map={"": device})
    assert model.dtype == dtype
    assert model.device.type == device


def test_with_it_one_does(checkpoint: Path, threads: set[str]) -> None:
    load(checkpoint, torch.float32, "mps")
    assert threads == {"MainThread"}
    assert guards.get("async-loading").lines == ["weights of another dtype are loaded onto mps in one thread"]


@pytest.mark.parametrize(("dtype", "device"), [(torch.bfloat16, "mps"), (torch.float32, "cpu")])
def test_what_needs_no_conversion_on_metal_is_loaded_as_ever(
    dtype: torch.dtype, device: str, checkpoint: Path, threads: set[str]
) -> None:
    load(checkpoint, dtype, device)
    assert "MainThread" not in threads
    assert not guards.get("async-loading").times


def test_who_sets_transformers_own_variable_has_decided(
    checkpoint: Path, threads: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0")
    load(checkpoint, torch.float32, "mps")
    assert "MainThread" not in threads
