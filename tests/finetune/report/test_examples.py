"""What each evaluation shows: boxes, masks or texts of a few rows, in the run's folder and for a tracker."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hf_mps.finetune.report import examples
from tests.conftest import Run
from tests.finetune import senses, tiny
from tests.finetune.run_files import predictions
from tests.finetune.tiny import Command, Stop

pytestmark = pytest.mark.usefixtures("own_cache")
RECIPE = (
    senses.BOXES
    + """\
seed: 1
training: {max_steps: 4, logging_steps: 1, eval_strategy: steps, eval_steps: 2, save_strategy: steps, save_steps: 2}
"""
)
TEXTS = ("translation/opus-books", "--smoke", "training.eval_strategy=steps", "training.eval_steps=3")


@pytest.fixture
def scenes(desk: Path) -> Path:
    """The desk with a tiny YOLOS, 16 scenes to learn from and 6 others."""
    senses.yolos(desk / "yolos")
    for name, numbers in (("train", range(16)), ("dev", range(16, 22))):
        tiny.write_jsonl(desk / f"{name}.jsonl", [senses.boxed(desk, number) for number in numbers])
    (desk / "my.yaml").write_text(RECIPE, encoding="utf-8")
    return desk


def logged(run: Path, step: int) -> list[dict[str, float]]:
    """Every loss and measure of a run's checkpoint, without its times and its memory."""
    state = json.loads((run / f"checkpoint-{step}" / "trainer_state.json").read_text(encoding="utf-8"))
    others = ("runtime", "per_second", "memory_bytes")
    return [{name: one for name, one in entry.items() if not name.endswith(others)} for entry in state["log_history"]]


def written(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (run / "examples").iterdir()}


def events(run: Path) -> list[Any]:
    """What a run's event files say of its examples: (step, PNG) of pictures, (step, text) of texts."""
    proto = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for file in sorted(run.rglob("events.out.tfevents.*")):
        content = file.read_bytes()
        while content:  # each record: its length, a checksum of that, the record, and a checksum
            (length,) = struct.unpack("<Q", content[:8])
            event = proto.Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            for value in event.summary.value:
                if value.tag.startswith("examples"):
                    text = value.tensor.string_val
                    found.append((event.step, text[0].decode() if text else value.image.encoded_image_string))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_boxes_of_each_evaluation_change_no_number_and_a_stopped_run_goes_on_with_them(
    scenes: Path, finetune: Command, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRC32C_SW_MODE", "auto")  # tensorboardX sets it when it is first imported
    assert finetune("my.yaml", "examples=false", "output_dir=without").code == 0
    finetune("my.yaml", "output_dir=with", "training.report_to=tensorboard").finished()
    assert not (scenes / "without/examples").exists()
    assert logged(scenes / "with", 4) == logged(scenes / "without", 4)
    shown = written(scenes / "with")
    assert sorted(shown) == [f"step-00000{step}.png" for step in (2, 4)]
    assert all(picture.startswith(b"\x89PNG") and len(picture) < 200_000 for picture in shown.values())
    there = events(scenes / "with")
    assert [step for step, _ in there] == [2, 4]
    assert all(picture.startswith(b"\x89PNG") for _, picture in there)

    stop(3)
    assert finetune("my.yaml", "output_dir=stopped").code != 0
    assert finetune("my.yaml", "output_dir=stopped").code == 0
    assert logged(scenes / "stopped", 4) == logged(scenes / "with", 4)
    assert written(scenes / "stopped") == shown


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("recipe", "steps"),
    [("image-generation/lora", (0, 1, 2)), ("image-segmentation", (1, 2))],  # the first is measured at its start
)
def test_generated_pictures_and_masks_change_no_number(
    recipe: str, steps: tuple[int, ...], tmp_path: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = (
        ("image_size=64", "generate.num_inference_steps=2", "generate.rows=2")
        if recipe.startswith("image-generation")
        else ()
    )
    often = [f"training.{key}=1" for key in ("eval_steps", "save_steps")]
    often += [f"training.{key}=steps" for key in ("eval_strategy", "save_strategy")]
    for folder, shown in (("with", "true"), ("without", "false")):
        words = (recipe, "--smoke", *small, *often, "training.max_steps=2", "training.logging_steps=1")
        assert finetune(*words, f"examples={shown}", f"output_dir={folder}").code == 0
    assert logged(tmp_path / "with", 2) == logged(tmp_path / "without", 2)
    assert sorted(written(tmp_path / "with")) == [f"step-00000{step}.png" for step in steps]
    assert not (tmp_path / "without/examples").exists()


def test_what_cannot_be_drawn_is_told_and_the_training_goes_on(
    scenes: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hf_mps.finetune.report.pictures.boxes", Mock(side_effect=OSError(28, "No space left on device"))
    )
    ended = finetune("my.yaml", "training.max_steps=2")
    assert ended.code == 0
    told = "hf-mps: an evaluation's examples is left out: no space is left on the disk; the training goes on"
    assert told in ended.err


def test_the_oldest_go_where_there_are_many(scenes: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "KEPT", 1)
    assert finetune("my.yaml", "output_dir=run").code == 0
    assert sorted(written(scenes / "run")) == ["step-000004.png"]


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("recipe", "few"),
    [
        ("translation/opus-books", ("max_target_length=8",)),
        ("sft/alpaca", ("generate.max_new_tokens=8",)),
        ("speech-recognition/librispeech", ()),
    ],
)
def test_texts_stand_beside_their_reference_and_are_those_of_predictions_csv(
    recipe: str, few: tuple[str, ...], tmp_path: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRC32C_SW_MODE", "auto")
    monkeypatch.chdir(tmp_path)
    keys = ("training.eval_strategy=steps", "training.eval_steps=3", "training.report_to=tensorboard")
    assert finetune(recipe, "--smoke", "output_dir=run", "training.max_steps=6", *keys, *few).code == 0
    last = predictions(tmp_path / "run", "examples/step-000006.csv")
    assert last == predictions(tmp_path / "run")[: examples.ROWS]
    truth, answer = ("truth", "prediction") if "truth" in last[0] else ("reference", "generated")
    assert all(row[truth] for row in last)
    there = dict(events(tmp_path / "run"))
    assert {3, 6} <= set(there)
    assert there[6].splitlines()[0].count(f"{answer}") == 1
    assert last[0][truth].split()[0] in there[6]


TRACKERS = {
    "trackio": """
import json, os, sqlite3
from pathlib import Path
(file,) = Path(os.environ["TRACKIO_DIR"]).glob("*.db")
rows = [json.loads(row[0]) for row in sqlite3.connect(file).execute("SELECT metrics FROM metrics")]
print([row["eval/examples"]["_type"] for row in rows if "eval/examples" in row])
""",
    "mlflow": """
import mlflow
(run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
print([file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id, "examples")])
""",
    "wandb": """
from pathlib import Path
print(sorted(file.suffix for file in Path("wandb").glob("offline-run*/files/media/**/examples*")))
""",
}
KINDS = {
    "trackio": (["trackio.image"] * 2, ["trackio.table"] * 2),
    "mlflow": ([f"examples/step-00000{step}.png" for step in (2, 4)], [f"examples/step-00000{n}.csv" for n in (3, 6)]),
    "wandb": ([".png"] * 2, [".json"] * 2),
}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.parametrize("tracker", TRACKERS)
def test_trackers_hold_the_pictures_and_the_texts(tracker: str, scenes: Path, run_python: Run) -> None:
    pytest.importorskip(tracker)
    for at, words in enumerate((("my.yaml",), TEXTS)):
        home = scenes / f"home{at}"
        home.mkdir()
        env = {"TRACKIO_DIR": str(home), "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": f"sqlite:///{home}/flow.db"}
        env |= {"WANDB_DIR": str(home), "HF_MLFLOW_LOG_ARTIFACTS": "0"}
        asked = (*words, f"training.report_to={tracker}", f"output_dir=run{at}")
        done = run_python("-m", "hf_mps", "finetune", *asked, env=env, cwd=scenes)
        assert done.returncode == 0, done.stderr
        read = run_python("-c", TRACKERS[tracker], env=env, cwd=home)
        assert read.returncode == 0, read.stderr
        assert read.stdout.strip().splitlines()[-1] == str(KINDS[tracker][at])
