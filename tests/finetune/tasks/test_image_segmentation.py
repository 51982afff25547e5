"""Semantic segmentation: images and masks stay together, classes are learned, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
from datasets import Dataset
from PIL import Image

from hf_mps.cli.main import main
from hf_mps.core.errors import UserError
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.tasks import image_segmentation
from tests.finetune import builders, senses, tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command

pytestmark = pytest.mark.usefixtures("own_cache")

NAMES = ["ground", "red", "blue"]
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
  max_steps: 24
  eval_strategy: 'no'
  save_strategy: 'no'
"""


@pytest.fixture(scope="module")
def segformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return senses.segformer(tmp_path_factory.mktemp("models") / "segformer")


@pytest.fixture
def scenes(desk: Path, segformer: Path) -> Path:
    """The desk with a tiny SegFormer, 24 scenes to learn from and 8 others."""
    shutil.copytree(segformer, desk / "segformer")
    for name, numbers in (("train", range(24)), ("dev", range(24, 32))):
        tiny.write_csv(desk / f"{name}.csv", [senses.masked(desk, number) for number in numbers])
    (desk / "my.yaml").write_text(RECIPE, encoding="utf-8")
    return desk


@pytest.mark.usefixtures("rendered")
def test_it_learns_classes_on_mps_and_the_saved_model_answers(
    scenes: Path, finetune: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    """Mean IoU rises by 0.3 over the one of the most frequent class everywhere, on other scenes; evaluate's own formula
    is tested in tests/metrics.
    """
    finetune("my.yaml").finished()
    said = results(scenes / "runs/my")
    assert said["device"]["value"] == "mps"
    assert said["fallback"] == []
    assert set(said["metrics"]) >= {"mean_iou", "mean_accuracy", "overall_accuracy"}
    assert said["metrics"]["mean_iou"] > said["baseline"]["metrics"]["mean_iou"] + 0.3
    assert said["baseline"]["what"].startswith("always answers ground")
    assert said["pictures"] == ["masks.png"]
    assert (scenes / "runs/my/masks.png").read_bytes().startswith(b"\x89PNG")
    lines = predictions(scenes / "runs/my")
    assert [line["image"] for line in lines] == [f"{number}.png" for number in range(24, 32)]
    assert all(float(line["overall_accuracy"]) > 0.5 for line in lines)
    assert set(lines[0]) == {"row", "image", "mean_iou", "overall_accuracy", "prediction"}

    tiny.write_csv(scenes / "new.csv", [{"image": "24.png"}, {"image": "25.png"}])
    capfd.readouterr()
    assert main(["predict", "runs/my", "new.csv", "--format", "jsonl"]) == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert ["red" in row["prediction"] for row in found] == [True, False]
    assert ["blue" in row["prediction"] for row in found] == [False, True]
    assert "mask" not in found[0]
    assert main(["predict", "runs/my", "new.csv", "--out", "answers.jsonl"]) == 0
    beside = [json.loads(line) for line in (scenes / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["mask"] for row in beside] == ["answers.files/000001.png", "answers.files/000002.png"]
    for row in beside:
        with Image.open(scenes / row["mask"]) as mask, Image.open(scenes / row["image"]) as image:
            assert (mask.mode, mask.size) == ("P", image.size)
            shares = numpy.bincount(numpy.asarray(mask).ravel(), minlength=3) / (mask.width * mask.height)
        named = dict(part.rsplit(" ", 1) for part in row["prediction"].split(", "))
        assert {name: f"{share:.0%}" for name, share in zip(NAMES, shares, strict=True) if share} == named
    assert main(["predict", "runs/my", "new.csv", "--out", "answers.csv"]) == 2
    assert not (scenes / "answers.csv").exists()
    assert (
        capfd.readouterr()
        .err.splitlines()[-1]
        .endswith("the folder of the pictures answers.files exists already; give another name")
    )


def prepare(folder: Path, segformer: Path, **values: Any) -> Any:
    data = {"files": {"train": str(folder / "train.csv"), "validation": str(folder / "train.csv")}, "labels": NAMES}
    return builders.prepare(task="image-segmentation", model=str(segformer), **{"data": data, **values})


def test_an_image_and_its_mask_are_varied_together(tmp_path: Path, segformer: Path) -> None:
    """Where a pixel of the prepared image is red, its class is red: wherever it was cropped and mirrored to."""
    rows = []
    for number in range(6):
        row = senses.masked(tmp_path, number)
        mask = numpy.asarray(Image.open(tmp_path / row["mask"]))
        Image.fromarray(numpy.array(senses.PAINTS, dtype=numpy.uint8)[mask]).save(tmp_path / row["image"])
        rows.append(row)
    tiny.write_csv(tmp_path / "train.csv", rows)
    prepared = prepare(tmp_path, segformer, augmentation={"crop": [0.3, 0.9], "flip": 0.5})
    means = numpy.array(prepared.processing_class.image_mean), numpy.array(prepared.processing_class.image_std)
    seen = set()
    for epoch in range(3):
        prepared.train.begin(epoch)
        for row in prepared.train:
            pixels = row["pixel_values"].numpy().transpose(1, 2, 0) * means[1] + means[0]
            distance = numpy.abs(pixels[..., None, :] * 255 - numpy.array(senses.PAINTS)).sum(-1)
            nearest, labels = distance.argmin(-1), row["labels"].numpy()
            sure = distance.min(-1) < 5  # between two classes the colours are mixed
            assert sure.mean() > 0.5
            assert (nearest == labels)[sure].mean() > 0.99
            seen.add(labels.tobytes())
    assert len(seen) > 6


def test_zero_is_no_class_where_the_recipe_says_so(tmp_path: Path, segformer: Path) -> None:
    tiny.write_csv(tmp_path / "train.csv", [senses.masked(tmp_path, number) for number in range(2)])
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
    row = senses.masked(tmp_path, 0)
    Image.fromarray(mask).save(tmp_path / row["mask"])
    tiny.write_csv(tmp_path / "train.csv", [row])
    data = {"files": {"train": str(tmp_path / "train.csv"), "validation": str(tmp_path / "train.csv")}}
    with pytest.raises(UserError) as raised:
        _ = prepare(tmp_path, segformer, data={**data, "labels": labels}, augmentation=None).train[0]
    assert problem in str(raised.value)


@pytest.mark.parametrize(("classes", "mode"), [(4, "P"), (256, "P"), (300, "I;16")])
def test_a_written_mask_holds_the_numbers_of_its_classes_and_can_be_learned_from(
    tmp_path: Path, classes: int, mode: str
) -> None:
    numbers = (numpy.arange(20 * 30) % classes).reshape(20, 30)
    (tmp_path / "mask.png").write_bytes(image_segmentation.png(numbers))
    with Image.open(tmp_path / "mask.png") as written:
        assert written.mode == mode
        if mode == "P":
            # Pascal VOC's first colours: black, maroon, green, olive.
            assert written.getpalette()[:12] == [0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0]
    split = Rows(Dataset.from_dict({"mask": [str(tmp_path / "mask.png")]}), "here")
    assert (image_segmentation.mask_of(split, 0, reduce=False) == numbers).all()
