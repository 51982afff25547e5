"""What cannot be exported: one line that says what came, what is allowed and what is next, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hf_mps.core import extras
from hf_mps.finetune import tasks
from hf_mps.tools.export import base
from hf_mps.tools.export.make import FORMATS, named
from tests import CHECKOUT
from tests.finetune.tiny import Ended
from tests.refusals import refusal

Run = Callable[..., Ended]


@pytest.fixture
def desk(classifier: Path, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the models under short names."""
    (tmp_path / "sorter").symlink_to(classifier)
    (tmp_path / "stories").symlink_to(stories)
    (tmp_path / "taken").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "merge sorter out",
            "'merge' is not a format; allowed: merged, gguf, mlx, coreml, onnx; did you mean 'merged'?",
        ),
        ("merged sorter taken", "taken exists already, and an export overwrites nothing; give another OUT"),
        (
            "merged sorter out --weights int4",
            "--weights int4: export merged does not write these; allowed: bf16, f16, f32",
        ),
        ("onnx sorter out --lengths 16,32", "--lengths is for export coreml; leave it out of onnx"),
        ("mlx stories out --converter x", "--converter is for export gguf; leave it out of mlx"),
        (
            "mlx sorter out",
            "sorter is a model for text-classification, which export mlx cannot hold; allowed: causal-lm, distill,"
            " dpo, grpo, kto, orpo, sft; next: hf-mps export merged sorter OUT, or coreml, or onnx",
        ),
        (
            "coreml stories out",
            "stories is a model for causal-lm, which export coreml cannot hold; allowed: masked-lm,"
            " question-answering, text-classification, token-classification; next: hf-mps export merged stories OUT,"
            " or gguf, or mlx, or onnx",
        ),
        ("merged taken out", "taken: the folder holds no model; allowed: a run's folder, or one that save_pretrained"),
    ],
)
def test_each_refusal_is_one_line(words: str, said: str, hf_mps: Run, desk: Path) -> None:
    before = sorted(path.name for path in desk.iterdir())
    ended = hf_mps("export", *words.split())
    assert ended.code == 2
    assert ended.err.startswith(f"hf-mps: {said}")
    assert len(ended.err.splitlines()) == 1
    assert ended.out == ""
    assert sorted(path.name for path in desk.iterdir()) == before


@pytest.mark.parametrize("name", [one.name for one in FORMATS.values() if one.modules])
def test_a_package_that_is_missing_is_named_with_what_installs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = named(name)
    monkeypatch.setattr(base, "find_spec", lambda module: None if module == form.modules[-1] else module)
    monkeypatch.setattr(extras, "install", lambda extra: f"pip install 'hf-mps[{extra}]'")
    assert refusal(form.refuse_missing) == f"export {name} needs {form.modules[-1]}; next: pip install 'hf-mps[{name}]'"
    assert f"\n{name} = [" in (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")


def test_formats_name_tasks_that_there_are() -> None:
    assert {shape for form in FORMATS.values() for shape in form.shapes} == {
        task.shape for task in tasks.every() if task.shape
    }
    assert all(set(form.weights) <= set(base.TOLERANCE) for form in FORMATS.values())
