"""Object detection: boxes in every usual shape, learned and measured, alike in a resumed run, and what is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_mps.core.errors import UserError
from tests.finetune import builders, tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command

COLOURS = {"red": (230, 30, 30), "blue": (30, 50, 230)}
NAMES = list(COLOURS)
SIZE = (48, 32)
RECIPE = """# Red and blue things.
task: object-detection
model: yolos
data:
  files: {train: train.jsonl, validation: dev.jsonl}
  columns: {image: image, objects: objects}
  labels: [red, blue]
image_size: 32
threshold: 0.3
seed: 1
training:
  per_device_train_batch_size: 8
  learning_rate: 2e-3
  max_grad_norm: 0.5
  max_steps: 160
  logging_steps: 40
"""


@pytest.fixture(scope="module")
def yolos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny YOLOS that looks for at most three objects."""
    import torch
    from transformers import YolosConfig, YolosModel

    from hf_mps.finetune.smoke import tiny_model

    place = tmp_path_factory.mktemp("models") / "yolos"
    place.mkdir()
    tiny_model.image_processor(place, (32, 32), "YolosImageProcessor")
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = YolosConfig(
        **size, image_size=[32, 32], patch_size=8, num_detection_tokens=3, use_mid_position_embeddings=False
    )
    YolosModel(config).save_pretrained(place)
    return place


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def scene(folder: Path, number: int) -> dict[str, Any]:
    """Write a rectangle of a colour about the middle; return its row."""
    from PIL import Image, ImageDraw

    draw = random.Random(number)
    kind, left, upper = NAMES[number % 2], draw.randrange(12, 18), draw.randrange(4, 10)
    image = Image.new("RGB", SIZE, (20, 20, 20))
    ImageDraw.Draw(image).rectangle((left, upper, left + 19, upper + 17), COLOURS[kind])
    image.save(folder / f"{number}.png")
    return {"image": f"{number}.png", "objects": [{"bbox": [left, upper, 20, 18], "category": kind}]}


@pytest.fixture
def scenes(desk: Path, yolos: Path) -> Path:
    """The desk with a tiny YOLOS, 48 scenes to learn from and 8 others."""
    shutil.copytree(yolos, desk / "yolos")
    for name, numbers in (("train", range(48)), ("dev", range(48, 56))):
        tiny.write_jsonl(desk / f"{name}.jsonl", [scene(desk, number) for number in numbers])
    (desk / "my.yaml").write_text(RECIPE, encoding="utf-8")
    return desk


def test_it_learns_boxes_on_mps_and_the_saved_model_answers(
    scenes: Path, finetune: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    """map_50 on other scenes is above 0.8: finding nothing has 0, and boxes in the right place of either colour 0.5."""
    from hf_mps.cli.main import main

    ended = finetune("my.yaml")
    assert (ended.code, ended.err) == (0, "")
    said = results(scenes / "runs/my")
    assert said["device"]["value"] == "mps"
    assert said["fallback"] == []
    assert said["metrics"]["map_50"] > 0.8
    assert said["baseline"]["metrics"]["map_50"] == 0
    lines = predictions(scenes / "runs/my")
    assert [line["image"] for line in lines] == [f"{number}.png" for number in range(48, 56)]
    best = [line["prediction"].partition(" ")[0] for line in lines]
    assert sum(one == NAMES[number % 2] for number, one in enumerate(best)) >= 7

    tiny.write_csv(scenes / "new.csv", [{"image": "48.png"}, {"image": "49.png"}])
    capfd.readouterr()
    assert main(["predict", "runs/my", "new.csv", "--format", "jsonl"]) == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["prediction"] for row in found] == [line["prediction"] for line in lines[:2]]


def test_a_resumed_run_sees_the_images_that_it_would_have_seen(scenes: Path, finetune: Command) -> None:
    import torch
    from safetensors.torch import load_file

    steps = ("training.save_strategy=steps", "training.save_steps=4", "training.max_steps=8")
    assert finetune("my.yaml", *steps, "output_dir=whole").code == 0
    resumed = "training.resume_from_checkpoint=whole/checkpoint-4"
    assert finetune("my.yaml", *steps, resumed, "output_dir=resumed").code == 0
    whole, again = (load_file(scenes / name / "model.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def prepare(folder: Path, yolos: Path, rows: list[dict[str, Any]], **values: Any) -> Any:
    file = str(tiny.write_jsonl(folder / "rows.jsonl", rows))
    data = {"files": {"train": file, "validation": file}, "labels": NAMES}
    return builders.prepare(
        task="object-detection", model=str(yolos), **{"data": data, "image_size": 32, "flip": 0.0, **values}
    )


def test_every_usual_shape_of_objects_is_read_alike_and_boxes_are_shares_of_the_image(
    tmp_path: Path, yolos: Path
) -> None:
    row = scene(tmp_path, 0)
    left, upper, width, height = row["objects"][0]["bbox"]
    shares = [(left + width / 2) / 48, (upper + height / 2) / 32, width / 48, height / 32]
    corners = [left, upper, left + width, upper + height]
    shapes: list[tuple[Any, str]] = [
        (row["objects"], "xywh"),
        ({"bbox": [row["objects"][0]["bbox"]], "category_id": [0]}, "xywh"),
        ([{"box": corners, "label": "red"}], "xyxy"),
    ]
    for objects, form in shapes:
        made = prepare(tmp_path, yolos, [{**row, "objects": objects}], box_format=form).train[0]["labels"]
        assert made["class_labels"].tolist() == [0]
        assert made["boxes"][0].tolist() == pytest.approx(shares, abs=1e-6)
    mirrored = prepare(tmp_path, yolos, [row], flip=1.0).train[0]["labels"]["boxes"][0].tolist()
    assert mirrored == pytest.approx([1 - shares[0], *shares[1:]], abs=1e-6)


@pytest.mark.parametrize(
    ("objects", "problem"),
    [
        ([{"bbox": [1, 2, 3], "category": 0}], "row 1 has a box [1, 2, 3]; allowed: four numbers, xywh in pixels"),
        ([{"bbox": [1, 2, 3, 4], "category": 2}], "row 1 has an object of class 2; allowed: 0 to 1, or a name"),
        ([{"bbox": [1, 2, 3, 4], "category": "rde"}], "has an object of class 'rde'; allowed: 0 to 1, or a name"),
        ([{"bbox": [1, 2, 3, 4]}], "row 1 has an object without category (bbox); allowed: category, category_id"),
        ([], "no row has an object; allowed: one in some rows at least"),
    ],
)
def test_objects_that_cannot_be_learned_are_refused(tmp_path: Path, yolos: Path, objects: Any, problem: str) -> None:
    with pytest.raises(UserError) as raised:
        prepare(tmp_path, yolos, [{**scene(tmp_path, 0), "objects": objects}])
    assert problem in str(raised.value)
