"""Semantic segmentation: images and masks stay together, classes are learned, runs resume, and what is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest

from hf_mps.core.errors import UserError
from tests.finetune import builders, tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command

COLOURS = ((60, 60, 60), (220, 40, 40), (40, 60, 220))
NAMES = ["ground", "red", "blue"]
SIZE = (40, 32)
RECIPE = """# Red and blue things on the ground.
task: image-segmentation
model: segformer
data:
  files: {train: train.csv, validation: dev.csv}
  columns: {image: image, mask: mask}
  labels: [ground, red, blue]
seed: 1
training:
  per_device_train_batch_size: 4
  learning_rate: 1e-2
  num_train_epochs: 6
"""


@pytest.fixture(scope="module")
def segformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hf_mps.finetune.smoke import tiny_model
    from hf_mps.finetune.smoke.families import Family

    place = tmp_path_factory.mktemp("models") / "segformer"
    tiny_model.write(Family("segformer", "image and mask", "", {}), place, [], 1)
    return place


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def scene(folder: Path, number: int) -> dict[str, Any]:
    """Write a rectangle of a class on the ground, noisy, and its mask; return its row."""
    from PIL import Image

    draw = random.Random(number)
    mask = numpy.zeros(SIZE[::-1], dtype=numpy.uint8)
    left, upper = draw.randrange(0, 20), draw.randrange(0, 14)
    mask[upper : upper + 16, left : left + 18] = 1 + number % 2
    noise = numpy.random.default_rng(number).integers(-25, 26, (*mask.shape, 3))
    pixels = numpy.clip(numpy.array(COLOURS)[mask] + noise, 0, 255).astype(numpy.uint8)
    Image.fromarray(pixels).save(folder / f"{number}.png")
    Image.fromarray(mask).save(folder / f"{number}-mask.png")
    return {"image": f"{number}.png", "mask": f"{number}-mask.png"}


@pytest.fixture
def scenes(desk: Path, segformer: Path) -> Path:
    """The desk with a tiny SegFormer, 24 scenes to learn from and 8 others."""
    shutil.copytree(segformer, desk / "segformer")
    for name, numbers in (("train", range(24)), ("dev", range(24, 32))):
        tiny.write_csv(desk / f"{name}.csv", [scene(desk, number) for number in numbers])
    (desk / "my.yaml").write_text(RECIPE, encoding="utf-8")
    return desk


def test_it_learns_classes_on_mps_and_the_saved_model_answers(
    scenes: Path, finetune: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    """Mean IoU rises by 0.3 over the one of the most frequent class everywhere, on other scenes; evaluate's own formula
    is tested in tests/metrics.
    """
    from hf_mps.cli.main import main

    ended = finetune("my.yaml")
    assert (ended.code, ended.err) == (0, "")
    said = results(scenes / "runs/my")
    assert said["device"]["value"] == "mps"
    assert said["fallback"] == []
    assert set(said["metrics"]) >= {"mean_iou", "mean_accuracy", "overall_accuracy"}
    assert said["metrics"]["mean_iou"] > said["baseline"]["metrics"]["mean_iou"] + 0.3
    assert said["baseline"]["what"].startswith("always answers ground")
    lines = predictions(scenes / "runs/my")
    assert [line["image"] for line in lines] == [f"{number}.png" for number in range(24, 32)]
    assert all(float(line["overall_accuracy"]) > 0.5 for line in lines)

    tiny.write_csv(scenes / "new.csv", [{"image": "24.png"}, {"image": "25.png"}])
    capfd.readouterr()
    assert main(["predict", "runs/my", "new.csv", "--format", "jsonl"]) == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert ["red" in row["prediction"] for row in found] == [True, False]
    assert ["blue" in row["prediction"] for row in found] == [False, True]


def test_a_resumed_run_sees_the_scenes_that_it_would_have_seen(scenes: Path, finetune: Command) -> None:
    import torch
    from safetensors.torch import load_file

    steps = ("training.save_strategy=steps", "training.save_steps=4", "training.max_steps=8")
    assert finetune("my.yaml", *steps, "output_dir=whole").code == 0
    resumed = "training.resume_from_checkpoint=whole/checkpoint-4"
    assert finetune("my.yaml", *steps, resumed, "output_dir=resumed").code == 0
    whole, again = (load_file(scenes / name / "model.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def prepare(folder: Path, segformer: Path, **values: Any) -> Any:
    data = {"files": {"train": str(folder / "train.csv"), "validation": str(folder / "train.csv")}, "labels": NAMES}
    return builders.prepare(task="image-segmentation", model=str(segformer), **{"data": data, **values})


def test_an_image_and_its_mask_are_varied_together(tmp_path: Path, segformer: Path) -> None:
    """Where a pixel of the prepared image is red, its class is red: wherever it was cropped and mirrored to."""
    from PIL import Image

    rows = []
    for number in range(6):
        row = scene(tmp_path, number)
        mask = numpy.asarray(Image.open(tmp_path / row["mask"]))
        Image.fromarray(numpy.array(COLOURS, dtype=numpy.uint8)[mask]).save(tmp_path / row["image"])
        rows.append(row)
    tiny.write_csv(tmp_path / "train.csv", rows)
    prepared = prepare(tmp_path, segformer, augmentation={"crop": [0.3, 0.9], "flip": 0.5})
    means = numpy.array(prepared.processing_class.image_mean), numpy.array(prepared.processing_class.image_std)
    seen = set()
    for epoch in range(3):
        prepared.train.begin(epoch)
        for row in prepared.train:
            pixels = row["pixel_values"].numpy().transpose(1, 2, 0) * means[1] + means[0]
            distance = numpy.abs(pixels[..., None, :] * 255 - numpy.array(COLOURS)).sum(-1)
            nearest, labels = distance.argmin(-1), row["labels"].numpy()
            sure = distance.min(-1) < 5  # between two classes the colours are mixed
            assert sure.mean() > 0.5
            assert (nearest == labels)[sure].mean() > 0.99
            seen.add(labels.tobytes())
    assert len(seen) > 6


def test_zero_is_no_class_where_the_recipe_says_so(tmp_path: Path, segformer: Path) -> None:
    tiny.write_csv(tmp_path / "train.csv", [scene(tmp_path, number) for number in range(2)])
    data = {"files": {"train": str(tmp_path / "train.csv"), "validation": str(tmp_path / "train.csv")}}
    prepared = prepare(tmp_path, segformer, data={**data, "labels": NAMES[1:]}, reduce_labels=True, augmentation=None)
    assert [sorted(row["labels"].unique().tolist()) for row in prepared.train] == [[0, 255], [1, 255]]
    assert prepared.baseline.metrics["overall_accuracy"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("mask", "labels", "problem"),
    [
        (numpy.full((32, 40), 7, numpy.uint8), NAMES, "mask has class 7, and data.labels names 3 classes, from 0 on"),
        (numpy.zeros((32, 40, 3), numpy.uint8), NAMES, "it has colours (mode RGB); allowed: one number a pixel"),
        (
            numpy.zeros((30, 40), numpy.uint8),
            NAMES,
            "mask has 40 x 30 pixels, and the image 40 x 32; allowed: the same",
        ),
        (numpy.zeros((32, 40), numpy.uint8), None, "data.labels names no classes, and masks hold their numbers alone"),
    ],
)
def test_masks_that_cannot_be_learned_are_refused(
    tmp_path: Path, segformer: Path, mask: Any, labels: list[str] | None, problem: str
) -> None:
    from PIL import Image

    row = scene(tmp_path, 0)
    Image.fromarray(mask).save(tmp_path / row["mask"])
    tiny.write_csv(tmp_path / "train.csv", [row])
    data = {"files": {"train": str(tmp_path / "train.csv"), "validation": str(tmp_path / "train.csv")}}
    with pytest.raises(UserError) as raised:
        _ = prepare(tmp_path, segformer, data={**data, "labels": labels}, augmentation=None).train[0]
    assert problem in str(raised.value)
