"""Runs that have ended, one for each task: trained once in a session on rows that are kept beside them."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sklearn  # noqa: F401  sets KMP_ variables when it is first imported, which no single test is to answer for

from tests.finetune.tiny import Ended

# A recipe of each task, with what makes its smoke run short.
RECIPES = {
    "text-classification": ("glue/mrpc",),
    "token-classification": ("token-classification/conll2003",),
    "question-answering": ("question-answering/squad_v2",),
    "multiple-choice": ("multiple-choice/swag",),
    "masked-lm": ("masked-lm/wikitext",),
    "causal-lm": ("causal-lm/wikitext",),
    "sft": ("sft/alpaca", "generate.max_new_tokens=12"),
    "distill": ("distill/alpaca", "generate.max_new_tokens=12", "distillation.lmbda=0"),
    # An adapter apart: merged weights are rounded, and rewards are differences of sums of logarithms.
    "dpo": ("dpo/ultrafeedback", "lora.export=adapter", "training.learning_rate=1e-2"),
    "orpo": ("orpo/ultrafeedback", "lora.export=adapter", "training.learning_rate=1e-2"),
    "kto": ("kto/kto-mix", "lora.export=adapter", "training.learning_rate=1e-2"),
    "summarization": ("summarization/xsum", "max_target_length=8"),
    "translation": ("translation/wmt16-en-ro", "max_target_length=8"),
    "sentence-embeddings": ("sentence-embeddings/stsb",),
    "image-classification": ("image-classification",),
    "speech-recognition": ("speech-recognition/librispeech",),
}


@dataclass(frozen=True)
class Kept:
    """A finished run: its folder, the file of its validation rows, and what its predictions.csv says."""

    folder: Path
    rows: Path

    @property
    def predictions(self) -> list[dict[str, str]]:
        return read_csv((self.folder / "predictions.csv").read_text(encoding="utf-8"))


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


Made = Callable[..., Kept]


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Train a task's recipe on a tiny model, once for the same words, and keep model and rows."""
    from tests.finetune.conftest import PIXEL

    made: dict[tuple[str, ...], Kept] = {}

    def run(task: str, *words: str) -> Kept:
        key = (task, *words)
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("hf_mps.finetune.report.plot._rendered", lambda figure: PIXEL)
                made[key] = _trained(tmp_path_factory.mktemp(task), *RECIPES[task], *words)
        return made[key]

    return run


def _trained(place: Path, recipe: str, *words: str) -> Kept:
    from hf_mps.finetune.recipe.resolve import load_recipe
    from hf_mps.finetune.run import run_dir, runner
    from hf_mps.finetune.smoke import smoke_recipe
    from hf_mps.layer.activation import activate
    from hf_mps.tools.dryrun.memory import adjust

    activate.activate()
    resolved = load_recipe(recipe, [f"output_dir={place / 'run'}", "training.max_steps=2", *words])
    with smoke_recipe(resolved) as small:
        runner.train(small, adjust.estimate_fit, keep=False)
        run_dir.store(place / "run", small, {})  # which has the paths of the rows, as that of a run that is kept
        theirs = Path(small.recipe.data.files["validation"]).parent
        shutil.copytree(theirs, place / "rows", ignore=shutil.ignore_patterns("cache"))
    rows = place / "rows" / "validation.jsonl"
    # Sound is named by its path, and the base model of a run too.
    rows.write_text(rows.read_text(encoding="utf-8").replace(str(theirs), str(place / "rows")), encoding="utf-8")
    stored = place / "run" / "recipe.yaml"
    stored.write_text(stored.read_text(encoding="utf-8").replace(str(theirs), str(place / "rows")), encoding="utf-8")
    return Kept(place / "run", rows)


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Run `hf-mps *arguments` in this process, with the text `stdin` on its standard input."""
    import sys

    from hf_mps.cli.main import main

    def run(*arguments: Any, stdin: str | bytes = "") -> Ended:
        content = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Ended(code, *capfd.readouterr())

    return run
