"""`hf-mps push`: a model and its card to the hub, as huggingface_hub's own client speaks to a hub on this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_mps.tools.export.make import chosen, content
from tests.conftest import Run
from tests.finetune.tiny import Ended
from tests.tools.export import hub

CARD = "---\nlibrary_name: transformers\n---\n\n# sorter\n\nFine-tuned by hf_mps on a simulated device `mps`.\n"


@pytest.fixture
def folder(classifier: Path, tmp_path: Path) -> Path:
    """A saved model with its card, and what training leaves beside it."""
    place = tmp_path / "sorter"
    shutil.copytree(classifier, place)
    (place / "README.md").write_text(CARD, encoding="utf-8")
    (place / "checkpoint-7").mkdir()
    (place / "checkpoint-7" / "optimizer.pt").write_bytes(b"state" * 100)
    (place / "checkpoint-7" / "model.safetensors").write_bytes(b"weights" * 10)
    (place / "training_args.bin").write_bytes(b"pickle")
    return place


def test_what_goes_and_what_stays_is_told_with_sizes_and_reasons(folder: Path) -> None:
    (folder / "recipe.yaml").write_text("data: /home/somebody", encoding="utf-8")
    (folder / ".saving").mkdir()
    (folder / ".saving" / "half").write_bytes(b"12")
    found = chosen(folder)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(found.files)
    assert found.left_out == {
        ".saving/": (2, "hidden"),
        "checkpoint-7/": (570, "checkpoints hold the optimizer's state"),
        "recipe.yaml": (20, "it holds paths of this machine; the card has the recipe"),
        "training_args.bin": (6, "the trainer's state, which no model is loaded with"),
    }
    assert found.files["model.safetensors"] == (folder / "model.safetensors").stat().st_size


def test_an_adapters_settings_go_without_the_path_of_a_local_base_model(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    told = {"peft_type": "LORA", "r": 8}
    for base, sent in {"/home/me/models/tiny": "tiny", "../tiny": "tiny", str(tmp_path): tmp_path.name}.items():
        file.write_text(json.dumps(told | {"base_model_name_or_path": base}), encoding="utf-8")
        goes = content(file)
        assert isinstance(goes, bytes)
        assert json.loads(goes) == told | {"base_model_name_or_path": sent}
    file.write_text(json.dumps(told | {"base_model_name_or_path": "Qwen/Qwen3-0.6B"}), encoding="utf-8")
    assert content(file) == file


def _environment(there: hub.Hub, folder: Path, token: str) -> dict[str, str | None]:
    """Whom the client speaks to, and as whom. Large files go by git-lfs, since xet asks for a service of its own."""
    home = str(folder.parent / "home")
    spoken = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_HOME": home}
    return {"HF_ENDPOINT": there.address, "HF_TOKEN": token, **spoken}


def test_a_model_reaches_the_hub_whole_and_its_checkpoints_do_not(run_python: Run, folder: Path) -> None:
    with hub.running() as there:
        env = _environment(there, folder, hub.TOKEN)
        done = run_python("-m", "hf_mps", "push", folder, "somebody/sorter", "--private", env=env)
    assert done.returncode == 0, done.stderr
    assert there.repositories["somebody/sorter"]["visibility"] == "private"
    kept = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    del kept["training_args.bin"]
    assert there.files == kept
    assert there.blobs, "the weights went as a large file"
    assert there.messages == ["Upload sorter with hf_mps"]
    assert f"sent      {there.address}/somebody/sorter/commit/1\n" in done.stdout
    assert "checkpoint-7/" in done.stdout


def test_a_token_that_the_hub_refuses_is_one_line(run_python: Run, folder: Path) -> None:
    with hub.running() as there:
        env = _environment(there, folder, "hf_wrong")
        done = run_python("-m", "hf_mps", "push", folder, "somebody/sorter", env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("hf-mps: the hub refuses somebody/sorter: ")
    assert done.stderr.endswith("; next: hf auth login, with a token that may write\n")
    assert len(done.stderr.splitlines()) == 1
    assert there.files == {}


@pytest.fixture
def without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where nobody has logged in, whatever this one is."""
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)


def test_without_a_token_it_says_what_would_go_and_how(
    without_a_token: None, hf_mps: Callable[..., Ended], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    ended = hf_mps("push", "sorter", "somebody/sorter")
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0].startswith("hf_mps push sorter to somebody/sorter: 5 files, ")
    assert lines[-2] == "nothing was sent: no token is stored"
    assert lines[-1] == "next  hf auth login, then hf-mps push sorter somebody/sorter"
    assert "  training_args.bin" in ended.out
    assert "not sent: the trainer's state, which no model is loaded with\n" in ended.out


@pytest.mark.parametrize(
    ("place", "name", "said"),
    [
        ("nowhere", "somebody/sorter", "nowhere: there is no such folder"),
        ("sorter", "some body/sorter", "some body/sorter: the hub does not accept this name: "),
        ("empty", "somebody/sorter", "empty: the folder holds no model"),
        ("torn", "somebody/sorter", "torn/model.safetensors: the weights cannot be read: "),
        ("wordless", "somebody/sorter", "model wordless: it has no tokenizer "),
    ],
)
def test_what_cannot_be_pushed_is_one_line(
    place: str, name: str, said: str, hf_mps: Callable[..., Ended], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    (folder.parent / "empty").mkdir()
    shutil.copytree(folder, "torn")
    Path("torn/model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])
    shutil.copytree(folder, "wordless", ignore=shutil.ignore_patterns("*token*", "vocab*"))
    ended = hf_mps("push", place, name, "--dry-run")
    assert ended.code == 2
    assert ended.err.startswith(f"hf-mps: {said}")
    assert len(ended.err.splitlines()) == 1
