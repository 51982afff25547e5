"""How Trainer's workers start: from a server without Metal where that works, as they were and told of elsewhere."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hf_mps.layer import guards
from hf_mps.layer.guards import GuardNotice
from hf_mps.layer.guards.platform import fork_server
from hf_mps.metal.device import probe
from tests.layer.guards import loops


@pytest.fixture(autouse=True)
def _in_use() -> Any:
    """Something lies on the device, and somebody has asked for it, as Trainer does."""
    assert torch.backends.mps.is_available()
    return torch.ones(1, device="mps")


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The start methods of the loaders that would start workers; none does, and no server."""
    found: list[str] = []

    def workers(loader: Any) -> Any:
        context = loader.multiprocessing_context
        if loader.num_workers:
            found.append(context.get_start_method() if context else "default")
        return iter(())

    guard: Any = guards.get("fork-workers")
    stock: Any = type("Stock", (), {"__call__": lambda self, loader: workers(loader)})()
    monkeypatch.setattr(DataLoader, "__iter__", lambda loader: guard._workers_start(stock, loader))
    monkeypatch.setattr(fork_server, "start", lambda modules: None)
    monkeypatch.setattr("multiprocessing.get_start_method", lambda allow_none: None)  # not settled yet
    return found


def of_trainer(**settings: Any) -> Any:
    """A loader as Trainer makes it on mps: with a fork that is its own idea."""
    guard: Any = guards.get("fork-workers")
    guard._trainers_own = True
    try:
        return DataLoader(**{"dataset": loops.rows(), "num_workers": 1, "multiprocessing_context": "fork", **settings})
    finally:
        guard._trainers_own = False


def main_module(monkeypatch: pytest.MonkeyPatch, file: Path | None, text: str = "", spec: str | None = None) -> Any:
    """Let the program be a script with this text (run with -m where there is a `spec`), or a prompt without a file."""
    main = ModuleType("__main__")
    main.__spec__ = ModuleSpec(spec, None) if spec else None
    if file is not None:
        file.write_text(text)
        main.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(text, str(file), "exec"), main.__dict__)
    return main


class Unsendable:
    """A dataset that holds what no other process can have."""

    def __init__(self) -> None:
        self.held: Callable[[], int] = lambda: 1

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


def test_trainer_s_workers_come_from_the_server_where_the_work_can_be_sent(starts: list[str], tmp_path: Path) -> None:
    run = loops.trainer(tmp_path, dataloader_num_workers=2)
    loader = run.get_train_dataloader()
    list(loader)
    assert starts == ["forkserver"]
    assert loader.multiprocessing_context.get_start_method() == "fork"  # the object is as Trainer made it
    assert "forked from a process that has used no Metal" in guards.get("fork-workers").lines[0]


def test_without_workers_nothing_is_looked_at(starts: list[str]) -> None:
    list(DataLoader([1, 2]))  # type: ignore[arg-type]
    assert starts == []
    assert not guards.get("fork-workers").times


def test_loaders_that_nobody_said_fork_to_start_workers_as_the_system_does(starts: list[str]) -> None:
    list(DataLoader(loops.rows(), num_workers=1))  # type: ignore[arg-type]
    assert starts == ["default"]
    assert not guards.get("fork-workers").times


def test_a_fork_that_the_script_asks_for_stays_and_is_told_of(
    starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(GuardNotice, match="as the script asks for"):
        list(DataLoader(loops.rows(), num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]
    list(DataLoader(loops.rows(), num_workers=1, multiprocessing_context="forkserver"))  # type: ignore[arg-type]
    assert starts == ["fork", "forkserver"]
    monkeypatch.setattr("multiprocessing.get_start_method", lambda allow_none: "fork")
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn", "fork"])  # a Mac's
    list(DataLoader(loops.rows(), num_workers=1))  # type: ignore[arg-type]
    assert starts[2:] == ["default"]
    assert guards.get("fork-workers").times == 2


def test_a_process_that_nobody_asked_for_metal_in_is_not_asked(
    starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(*_: Any) -> None:
        raise AssertionError("the guard looked at the device")

    monkeypatch.setattr(probe, "_known", None)
    monkeypatch.setattr(probe, "_find_out", touched)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", touched)
    list(of_trainer())
    list(DataLoader(loops.rows(), num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]
    assert starts == ["fork", "fork"]
    assert not guards.get("fork-workers").failure


def test_what_cannot_be_sent_is_forked_and_told_of(starts: list[str]) -> None:
    with pytest.warns(GuardNotice, match=r"the loader's dataset cannot be sent to a new process \(.*num_workers=0"):
        list(of_trainer(dataset=Unsendable()))
    assert starts == ["fork"]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="this system does not list descriptors there")
@pytest.mark.parametrize("sharing", torch.multiprocessing.get_all_sharing_strategies())  # type: ignore[no-untyped-call]
def test_a_look_at_a_loader_leaves_its_tensors_where_they_are(sharing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(100, 10))
    monkeypatch.setattr(torch.multiprocessing, "_sharing_strategy", sharing)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert fork_server.sent(DataLoader(data, num_workers=1)).obstacle == ""
    assert not data.tensors[0].is_shared()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_collator_that_holds_a_model_on_the_device_is_not_sent(starts: list[str]) -> None:
    class Collator:
        weight = torch.ones(2, device="mps")

    with pytest.warns(GuardNotice, match="the loader's collate_fn cannot be sent"):
        list(of_trainer(collate_fn=Collator()))
    assert starts == ["fork"]


@pytest.mark.parametrize(
    ("text", "spec", "method"),
    [
        ("train = print\ntrain()", None, "fork"),
        ("train = print\ntrain()", "package.train", "fork"),
        ("train = print\ntrain()", "package.__main__", "forkserver"),
        ('if __name__ == "__main__": pass', None, "forkserver"),
    ],
)
def test_a_script_that_would_run_again_in_each_worker_is_not(
    text: str, spec: str | None, method: str, starts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main_module(monkeypatch, tmp_path / "train.py", text, spec)
    list(of_trainer())
    assert starts == [method]
    (line,) = guards.get("fork-workers").lines
    assert ("train.py has no `if __name__" in line) == (method == "fork")


UNDER_MAIN = """
def collate(rows):
    return tokenizer(rows)
if __name__ == "__main__":
    for tokenizer in (len,):
        pass
"""
BY_A_FUNCTION = """
LENGTH = None
def main():
    global LENGTH
    LENGTH = 3
def collate(rows):
    return rows[:LENGTH]
if __name__ == "__main__":
    main()
"""
DEFINED_UNDER_MAIN = """
if __name__ == "__main__":
    def collate(rows):
        return rows
"""
CONSTANT = """
LENGTH = 3
def collate(rows):
    LOCAL = LENGTH
    return rows[:LOCAL]
def main():
    LOCAL = collate
if __name__ == "__main__":
    LOCAL = 4
    main()
"""


@pytest.mark.parametrize(
    ("text", "named"),
    [(UNDER_MAIN, "tokenizer"), (BY_A_FUNCTION, "LENGTH"), (DEFINED_UNDER_MAIN, "collate"), (CONSTANT, None)],
)
def test_what_only_the_run_gives_a_script_s_globals_is_not_missed(
    text: str, named: str | None, starts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = main_module(monkeypatch, tmp_path / "train.py", text)
    list(of_trainer(collate_fn=main.collate))
    assert starts == ["forkserver" if named is None else "fork"]
    (line,) = guards.get("fork-workers").lines
    assert named is None or f"may use __main__'s {named}, which a new process does not have" in line


def test_what_a_notebook_defined_is_not(starts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    main = main_module(monkeypatch, None, "def mine(rows): return rows")
    list(of_trainer())
    list(of_trainer(collate_fn=main.mine))
    assert starts == ["forkserver", "fork"]
    assert "a notebook or a prompt" in guards.get("fork-workers").lines[-1]


def test_what_the_user_said_to_trainer_stays(starts: list[str], tmp_path: Path) -> None:
    try:
        run = loops.trainer(tmp_path, dataloader_num_workers=2, dataloader_multiprocessing_context="fork")
    except TypeError:
        pytest.skip("this transformers has no dataloader_multiprocessing_context")
    list(run.get_train_dataloader())
    assert starts == ["fork"]


def test_the_server_imports_the_libraries_of_the_work_and_none_of_the_user_s_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main_module(
        monkeypatch, tmp_path / "train.py", "from transformers import Trainer\nfrom tests.layer.guards import loops"
    )
    found = fork_server.libraries(["__main__", "datasets.arrow_dataset", "os", "not.imported"])
    assert {"torch", "transformers.trainer", "datasets.arrow_dataset", "pytest"} <= {*found}
    assert not [name for name in found if name.startswith(("tests", "os", "__main__", "not"))]


class Telling:
    """Rows that tell about the process that makes them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
        variables = {name: value for name, value in os.environ.items() if name.startswith(("HF_MPS", "TELLING"))}
        return {
            "drawn": drawn,
            "dtype": torch.tensor(0.5).dtype,
            "folder": str(Path.cwd()),
            "variables": variables,
            "bad fork": torch.mps._is_in_bad_fork(),
            "there": torch.backends.mps.is_available(),
            "after": torch.mps._is_in_bad_fork(),
            "parent": os.getppid(),
            "process": os.getpid(),
        }


def first(rows: list[Any]) -> Any:
    """A collator that leaves rows as they are."""
    return rows[0]


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    """A server of these tests' own, which ends with them."""
    own: Any = forkserver._forkserver  # type: ignore[attr-defined]
    own._stop()
    yield
    own._stop()


@pytest.mark.usefixtures("server")
def test_a_worker_of_the_server_s_is_what_a_forked_one_is_but_for_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(suspended: bool) -> list[dict[str, Any]]:
        torch.manual_seed(7)
        loader = of_trainer(dataset=Telling(), collate_fn=first, batch_size=1, num_workers=2)
        if suspended:
            with guards.suspended("fork-workers"):
                return [*loader]
        return [*loader]

    before = dict(os.environ)
    served = [told(suspended=False)]
    monkeypatch.setenv("TELLING", "set after the server had started")
    torch.set_default_dtype(torch.float64)
    try:
        served.append(told(suspended=False))
        forked = told(suspended=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert guards.get("fork-workers").times == 2
    assert all(each["bad fork"] for each in forked)
    for each in (*served[0], *served[1]):
        assert (each["bad fork"], each["there"]) == (False, True)
    assert len({each["parent"] for each in (*served[0], *served[1])} - {os.getpid()}) == 1
    same = ("drawn", "dtype", "folder", "variables")
    assert [[each[name] for name in same] for each in served[1]] == [[each[name] for name in same] for each in forked]
    assert served[0][0]["dtype"] == torch.float32
    monkeypatch.delenv("TELLING")
    assert dict(os.environ) == before
    assert forkserver._forkserver._preload_modules == ["__main__"]  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("server")
def test_workers_that_stay_do_so_over_epochs_and_draw_what_forked_ones_draw() -> None:
    def epochs() -> list[list[dict[str, Any]]]:
        torch.manual_seed(8)
        loader = of_trainer(
            dataset=Telling(), collate_fn=first, batch_size=1, num_workers=2, persistent_workers=True, shuffle=True
        )
        return [[*loader], [*loader]]

    served = epochs()
    with guards.suspended("fork-workers"):
        forked = epochs()
    assert not any(each["bad fork"] for each in (*served[0], *served[1]))
    for found in (served, forked):
        assert len({each["process"] for epoch in found for each in epoch}) == 2
    drawn = [[[each["drawn"] for each in epoch] for epoch in found] for found in (served, forked)]
    assert drawn[0] == drawn[1]


@pytest.mark.usefixtures("server")
def test_a_server_that_does_not_live_costs_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "start", lambda modules: None)
    monkeypatch.setattr(fork_server.Worker, "start", Mock(side_effect=ConnectionRefusedError))
    loader = of_trainer(dataset=Telling(), collate_fn=first, num_workers=1)
    assert next(iter(loader))["bad fork"]
    assert not guards.get("fork-workers").failure
    assert loader.multiprocessing_context.get_start_method() == "fork"
