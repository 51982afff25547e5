"""A folder with a tiny model and data, and the command line called in this process."""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import share
from tests.finetune import tiny
from tests.finetune.terminals import Terminal
from tests.finetune.tiny import Command, Ended, Stop

# A picture of one pixel, for runs whose pictures nobody looks at.
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mP4DwABAQEAHLCMmQAAAABJRU5ErkJggg==")
EARLY = re.compile(r"\S+: loading PyTorch, the rows and the model …\n")


@pytest.fixture(scope="session")
def libraries() -> None:
    """Imports scikit-learn, which sets KMP_ variables when it is first imported: no single test is to answer for it."""
    import sklearn  # noqa: F401


@pytest.fixture(scope="session")
def _tiny_model(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def rendered() -> None:
    """Asked for by a test that looks at a run's pictures: see `_unrendered`."""


@pytest.fixture(autouse=True)
def _unrendered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run draw its pictures but not render them, which is half of a short run's time.

    What is left out is matplotlib's own Figure.savefig, and by day the panels of training.png: a tenth of the rest.
    """
    if "rendered" not in request.fixturenames:
        monkeypatch.setattr("hf_mps.finetune.report.plot._rendered", lambda figure: PIXEL)
        if not share.is_whole():
            monkeypatch.setattr("hf_mps.finetune.report.plot._draw_panels", lambda *_: None)


@pytest.fixture
def desk(_tiny_model: Path, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: `my.yaml`, `model/`, `train.csv` (48 rows), `dev.csv` (16 rows) and caches of its own."""
    place = tmp_path / "desk"
    place.mkdir()
    shutil.copytree(_tiny_model, place / "model")
    tiny.write_csv(place / "train.csv", tiny.rows(48))
    tiny.write_csv(place / "dev.csv", tiny.rows(16, 48))
    (place / "my.yaml").write_text(tiny.RECIPE, encoding="utf-8")
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def in_own_folder(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own folder is the current one, and its cache is empty."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `builders.model`'s tiny models, which nobody changes."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def qwen3(models: Path) -> str:
    """The folder of a tiny Qwen3."""
    from tests.finetune import builders

    return str(builders.model(models, "qwen3"))


@pytest.fixture
def finetune(capfd: pytest.CaptureFixture[str]) -> Command:
    """Run `python -m hf_mps.finetune *arguments` in this process.

    The line that it says before anything is loaded (test_early.py) is left out of what it printed.
    """
    from hf_mps.cli.main import main

    def run(*arguments: str) -> Ended:
        capfd.readouterr()
        code = main(["finetune", *arguments], program="python -m hf_mps.finetune")
        out, err = capfd.readouterr()
        return Ended(code, "".join(line for line in out.splitlines(keepends=True) if not EARLY.match(line)), err)

    return run


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 120 columns with colours."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")
    return Terminal()


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Stop:
    """Send this process a signal, SIGINT or `number`, in the middle of step `step` of the next training."""
    from transformers import Trainer

    training_step = Trainer.training_step

    def at(step: int, number: int = signal.SIGINT) -> None:
        def stepped(self: Any, *arguments: Any, **settings: Any) -> Any:
            loss = training_step(self, *arguments, **settings)
            if self.state.global_step == step - 1:
                monkeypatch.setattr(Trainer, "training_step", training_step)
                os.kill(os.getpid(), number)
            return loss

        monkeypatch.setattr(Trainer, "training_step", stepped)

    return at
