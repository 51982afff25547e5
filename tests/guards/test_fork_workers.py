"""How a loader's workers start: anew where that works and nobody said otherwise, as they were and told of elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hf_mps import guards
from hf_mps.guards import GuardNotice
from hf_mps.guards.fork_workers import ARGUMENT
from tests.guards import loops


@pytest.fixture(autouse=True)
def _in_use() -> Any:
    """Something lies on the device."""
    return torch.ones(1, device="mps")


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The start methods of the loaders that would start workers; none does."""
    found: list[str] = []

    def workers(loader: Any) -> Any:
        context = loader.multiprocessing_context
        if loader.num_workers:
            found.append(context.get_start_method() if context else "default")
        return iter(())

    guard = guards.get("fork-workers")
    monkeypatch.setattr(
        DataLoader, "_get_iterator", lambda loader: guard._workers_start(workers, loader) if guard.on else None
    )
    monkeypatch.setattr("multiprocessing.get_start_method", lambda allow_none: None)  # not settled yet
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["fork", "spawn"])  # Linux, before Python 3.14
    return found


def main_module(monkeypatch: pytest.MonkeyPatch, file: Path | None, text: str = "", spec: str | None = None) -> None:
    """Let the program be a script with this text (run with -m where there is a `spec`), or a prompt without a file."""
    main = ModuleType("__main__")
    main.__spec__ = ModuleSpec(spec, None) if spec else None
    if file is not None:
        file.write_text(text)
        main.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "__main__", main)


class Unsendable:
    """A dataset that holds what no other process can have."""

    def __init__(self) -> None:
        self.held: Callable[[], int] = lambda: 1

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


def test_workers_start_anew_where_the_work_can_be_sent(starts: list[str]) -> None:
    loader: Any = DataLoader(loops.rows(), num_workers=1)  # type: ignore[arg-type]
    list(loader)
    assert starts == ["spawn"]
    assert loader.multiprocessing_context is None  # the user's object is as it was
    assert "started anew (spawn) and not forked" in guards.get("fork-workers").lines[0]


def test_without_workers_nothing_is_looked_at(starts: list[str]) -> None:
    list(DataLoader([1, 2]))
    assert starts == []
    assert not guards.get("fork-workers").times


def test_a_start_method_that_the_user_gave_stays(starts: list[str]) -> None:
    with pytest.warns(GuardNotice, match="as multiprocessing_context asks for"):
        list(DataLoader(loops.rows(), num_workers=1, multiprocessing_context="fork"))
    list(DataLoader(loops.rows(), num_workers=1, multiprocessing_context="forkserver"))
    assert starts == ["fork", "forkserver"]


def test_what_cannot_be_sent_is_forked_and_told_of(starts: list[str]) -> None:
    with pytest.warns(GuardNotice, match=r"the loader's dataset cannot be sent to a new process \(.*num_workers=0"):
        list(DataLoader(Unsendable(), num_workers=1))
    assert starts == ["default"]


def test_a_collator_that_holds_a_model_on_the_device_is_not_sent(starts: list[str]) -> None:
    class Collator:
        weight = torch.ones(2, device="mps")

    with pytest.warns(GuardNotice, match="the loader's collate_fn cannot be sent"):
        list(DataLoader(loops.rows(), num_workers=1, collate_fn=Collator()))
    assert starts == ["default"]


@pytest.mark.parametrize(
    ("text", "spec", "method"),
    [
        ("train()", None, "default"),
        ("train()", "package.train", "default"),
        ("train()", "package.__main__", "spawn"),
        ('if __name__ == "__main__": train()', None, "spawn"),
    ],
)
def test_a_script_that_would_run_again_in_each_worker_is_not(
    text: str, spec: str | None, method: str, starts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main_module(monkeypatch, tmp_path / "train.py", text, spec)
    list(DataLoader(loops.rows(), num_workers=1))
    assert starts == [method]
    (line,) = guards.get("fork-workers").lines
    assert ("train.py has no `if __name__" in line) == (method == "default")


def test_what_a_notebook_defined_is_not(starts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    main_module(monkeypatch, None)
    list(DataLoader(loops.rows(), num_workers=1))

    def mine(rows: Any) -> Any:
        return rows

    mine.__module__, mine.__qualname__ = "__main__", "mine"
    sys.modules["__main__"].mine = mine  # type: ignore[attr-defined]
    list(DataLoader(loops.rows(), num_workers=1, collate_fn=mine))
    assert starts == ["spawn", "default"]
    assert "a notebook or a prompt" in guards.get("fork-workers").lines[-1]


def test_trainer_s_own_fork_is_not_the_user_s_word(starts: list[str], tmp_path: Path) -> None:
    run = loops.trainer(tmp_path, dataloader_num_workers=2)
    list(run.get_train_dataloader())
    assert starts == ["spawn"]
    with guards.suspended("fork-workers"):
        assert run.get_train_dataloader().multiprocessing_context.get_start_method() == "fork"


def test_what_the_user_said_to_trainer_is(starts: list[str], tmp_path: Path) -> None:
    try:
        run = loops.trainer(tmp_path, dataloader_num_workers=2, **{ARGUMENT: "fork"})
    except TypeError:
        pytest.skip(f"this transformers has no {ARGUMENT}")
    list(run.get_train_dataloader())
    assert starts == ["fork"]
