"""Images to classes: their sources, how they are varied, the same ones in a resumed run, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from inline_snapshot import snapshot
from PIL import Image
from transformers import AutoImageProcessor, ViTConfig, ViTModel, pipeline

from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.media import images
from hf_mps.finetune.media.images import Augmentation, Images
from tests.finetune import tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command
from tests.snapshots import masked

RECIPE = """# Tell red from blue.
task: image-classification
model: vit
data:
  folder: photos
seed: 1
training:
  per_device_train_batch_size: 8
  learning_rate: 5e-3
  num_train_epochs: 2
"""
COLOURS = {"blue": (30, 60, 220), "red": (220, 50, 30)}


def picture(colour: str, number: int) -> Any:
    """A noisy picture of 20 x 24 pixels in a colour."""
    draw = random.Random(f"{colour}{number}")
    base = COLOURS[colour]
    pixels = bytes(min(255, max(0, base[at % 3] + draw.randrange(-30, 31))) for at in range(3 * 20 * 24))
    return Image.frombytes("RGB", (20, 24), pixels)


def fill(folder: Path, count: int, offset: int = 0) -> None:
    """`count` pictures of each colour, in a folder for each."""
    for colour in COLOURS:
        (folder / colour).mkdir(parents=True)
        for number in range(offset, offset + count):
            picture(colour, number).save(folder / colour / f"{number:02}.png")


@pytest.fixture(scope="session")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vit") / "vit"
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ViTModel(ViTConfig(image_size=16, patch_size=8, **size)).save_pretrained(folder)
    says = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}, "resample": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(says), encoding="utf-8")
    return folder


@pytest.fixture
def photos(desk: Path, vit: Path) -> Path:
    """The desk with a tiny vision transformer and `photos/train` and `photos/val`."""
    shutil.copytree(vit, desk / "vit")
    fill(desk / "photos" / "train", 12)
    fill(desk / "photos" / "val", 4, 12)
    (desk / "my.yaml").write_text(RECIPE, encoding="utf-8")
    return desk


@pytest.mark.usefixtures("rendered")
def test_a_folder_of_images_trains_on_mps_and_the_snippet_of_the_card_runs(photos: Path, finetune: Command) -> None:
    finetune("my.yaml", "training.num_train_epochs=4").finished()
    said = results(photos / "runs/my")
    assert said["metrics"]["accuracy"] == 1.0
    assert said["baseline"]["metrics"]["accuracy"] == 0.5
    assert said["device"]["value"] == "mps"
    assert said["fallback"] == []
    assert said["choices"]["images"]["value"] == snapshot("height 16, width 16 pixels")
    assert said["choices"]["augmentation"]["value"] == snapshot("8% to 100% of the area, mirrored in 50%")
    lines = predictions(photos / "runs/my")
    assert [(Path(line["image"]).name, line["label"], line["prediction"]) for line in lines] == [
        (f"{number}.png", colour, colour) for colour in COLOURS for number in range(12, 16)
    ]
    assert (photos / "runs/my/confusion_matrix.png").read_bytes().startswith(b"\x89PNG")

    card = (photos / "runs/my/README.md").read_text(encoding="utf-8")
    assert 'classifier = pipeline("image-classification", model=".")' in card
    classifier = pipeline("image-classification", model=str(photos / "runs/my"), device="cpu")
    assert classifier(str(photos / "photos/val/red/12.png"))[0]["label"] == "red"


def test_a_split_without_one_of_the_classes_keeps_their_numbers(photos: Path, finetune: Command) -> None:
    shutil.rmtree(photos / "photos/val/blue")
    assert finetune("my.yaml", "training.max_steps=1").code == 0
    with (photos / "runs/my/predictions.csv").open(encoding="utf-8", newline="") as file:
        assert [line["label"] for line in csv.DictReader(file)] == ["red"] * 4


def test_a_flat_folder_is_split_by_a_share(photos: Path, finetune: Command) -> None:
    finetune("my.yaml", "data.folder=photos/train", "data.hold_out=0.25", "training.max_steps=1").finished()
    assert results(photos / "runs/my")["choices"]["data"]["value"] == "18 + 6 rows"


def test_paths_in_a_file_are_relative_to_the_file_and_parquet_holds_the_images(photos: Path, finetune: Command) -> None:
    tables: dict[str, list[dict[str, Any]]] = {}
    for split in ("train", "val"):
        files = sorted((photos / "photos" / split).rglob("*.png"))
        tables[split] = [{"image": f"{file.parent.name}/{file.name}", "label": file.parent.name} for file in files]
        tiny.write_csv(photos / "photos" / split / "rows.csv", tables[split])
        features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=list(COLOURS)))
        rows = [row | {"image": str(photos / "photos" / split / row["image"])} for row in tables[split]]
        datasets.Dataset.from_list(rows, features=features).to_parquet(photos / f"{split}.parquet")
    short = ("training.max_steps=2",)
    assert finetune("my.yaml", *short, "output_dir=folder").code == 0
    csvs = "data.files={train: photos/train/rows.csv, validation: photos/val/rows.csv}"
    assert finetune("my.yaml", *short, csvs, "output_dir=csv").code == 0
    inside = "data.files={train: train.parquet, validation: val.parquet}"
    assert finetune("my.yaml", *short, inside, "output_dir=parquet").code == 0
    losses = [results(photos / name)["metrics"]["loss"] for name in ("folder", "csv", "parquet")]
    assert losses[0] == losses[1] == losses[2]


def memory_rows(pictures: list[Any]) -> Rows:
    encoded = []
    for one in pictures:
        content = io.BytesIO()
        one.save(content, format="png", exif=one.getexif())
        encoded.append({"image": {"bytes": content.getvalue(), "path": None}})
    features = datasets.Features(image=datasets.Image(decode=False))
    return Rows(datasets.Dataset.from_list(encoded, features=features), "rows")


def test_what_is_drawn_hangs_on_seed_epoch_and_row_alone(vit: Path) -> None:
    processor = AutoImageProcessor.from_pretrained(vit, backend="pil")
    rows = memory_rows([picture("red", number) for number in range(4)])
    made, other, plain = (Images(rows, [0, 1, 0, 1], processor, seed) for seed in (3, 4, 3))
    made.augment = other.augment = Augmentation()
    first = [made[number]["pixel_values"] for number in range(4)]
    assert first[0].shape == (3, 16, 16)
    assert first[0].dtype == torch.float32
    random.seed(7)
    torch.manual_seed(7)
    assert all(torch.equal(made[number]["pixel_values"], first[number]) for number in (3, 0, 2, 1))
    worker = pickle.loads(pickle.dumps(made.__dict__ | {"_epoch": None}))  # a worker's copy, without the shared epoch
    copy = Images.__new__(Images)
    copy.__dict__.update(worker, _epoch=made._epoch)
    made.begin(1)
    second = made[0]["pixel_values"]
    assert not torch.equal(second, first[0])
    assert torch.equal(copy[0]["pixel_values"], second)
    assert made._epoch.is_shared()
    assert not torch.equal(other[0]["pixel_values"], first[0])
    expected = processor(picture("red", 0), return_tensors="pt")["pixel_values"][0]
    assert torch.equal(plain[0]["pixel_values"], expected)


def test_the_part_of_an_image_keeps_within_its_bounds() -> None:
    draw = random.Random(0)
    for width, height in ((20, 24), (300, 7), (1, 1)):
        for _ in range(200):
            left, upper, right, lower = images.part_of(width, height, (0.25, 0.5), draw)
            assert 0 <= left < right <= width
            assert 0 <= upper < lower <= height
    shares = [
        (right - left) * (lower - upper) / 10_000
        for left, upper, right, lower in (images.part_of(100, 100, (0.25, 0.5), draw) for _ in range(200))
    ]
    assert min(shares) == pytest.approx(0.25, abs=0.02)
    assert max(shares) == pytest.approx(0.5, abs=0.02)
    flipped = images.augmented(picture("red", 1), Augmentation(crop=[1.0, 1.0], flip=1.0), (24, 20), 2, draw)
    assert flipped.size == (20, 24)


def test_an_image_is_turned_as_its_exif_data_say_and_made_rgb() -> None:
    turned = Image.new("RGB", (4, 8), "red")
    turned.getexif()[0x0112] = 6  # rotated by 90 degrees
    rows = memory_rows([turned, Image.new("L", (4, 8), 128), Image.new("RGBA", (4, 8), (1, 2, 3, 4))])
    opened = [images.opened(rows, number) for number in range(3)]
    assert [one.size for one in opened] == [(8, 4), (4, 8), (4, 8)]
    assert {one.mode for one in opened} == {"RGB"}


def test_images_that_cannot_be_are_refused_before_the_run(photos: Path, finetune: Command) -> None:
    broken = photos / "photos/train/blue/03.png"
    broken.write_bytes(b"no image")
    ended = finetune("my.yaml")
    assert (ended.code, masked(ended.err, image=broken.resolve())) == (
        2,
        snapshot(
            "hf-mps: photos/train: row 4: image <image> is no image that Pillow can read; allowed: PNG, JPEG and"
            " the like\n"
        ),
    )
    tiny.write_csv(
        photos / "rows.csv",
        [{"image": "photos/train/red/00.png", "label": "red"}, {"image": "no.png", "label": "blue"}],
    )
    both = "data.files={train: rows.csv, validation: rows.csv}"
    assert finetune("my.yaml", both).refused() == snapshot("rows.csv: row 2: image: no.png: there is no such file")
    tiny.write_csv(
        photos / "rows.csv", [{"image": "photos/train/red/00.png", "label": "red"}, {"image": "", "label": "blue"}]
    )
    assert finetune("my.yaml", both).err == snapshot(
        "hf-mps: rows.csv: row 2 has no image; allowed: one in every row\n"
    )
    assert not (photos / "runs").exists()


def test_an_image_that_breaks_off_ends_the_run_in_one_line(photos: Path, finetune: Command) -> None:
    broken = photos / "photos/train/red/05.png"
    broken.write_bytes(broken.read_bytes()[:400])
    ended = finetune("my.yaml")
    told = f"hf-mps: photos/train: row 18: image {broken.resolve()} cannot be decoded: "
    assert (ended.code, ended.err[: len(told)], ended.err.count("\n")) == (2, told, 1)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("data.folder=phtos",), "data.folder: phtos: there is no such folder; did you mean 'photos'?"),
        (
            ("data.folder=photos/train",),
            "data.folder: photos/train holds no folder train or training for the train split; there are: blue, red; or"
            " data.hold_out=0.1 to keep a tenth of the training rows for validation",
        ),
        (
            ("data.folder=photos", "data.splits={train: train, validation: vall}"),
            "data.folder: photos holds no folder vall for the validation split; there are: train, val; did you mean"
            " 'val'?",
        ),
        (
            ("augmentation.crop=[0.5, 0.2]",),
            "my.yaml:1: augmentation.crop is [0.5, 0.2]; allowed: the least and the greatest share of the area, above 0"
            " and up to 1",
        ),
        (("model=model",), "model model: its image processor cannot be read: "),
    ],
)
def test_what_cannot_be_said_is_refused(photos: Path, finetune: Command, arguments: tuple[str, ...], line: str) -> None:
    ended = finetune("my.yaml", *arguments)
    assert ended.code == 2
    assert ended.err.replace("command line: ", "my.yaml:1: ").startswith(f"hf-mps: {line}")
    assert ended.err.count("\n") == 1


def test_real_photographs_train(shared_data: Path, photos: Path, finetune: Command) -> None:
    folder = f"data.folder={shared_data / 'images_ants_bees'}"
    finetune("my.yaml", folder, "training.max_steps=2", "data.rows.validation=20").finished()
    said = results(photos / "runs/my")["choices"]
    assert said["data"]["value"] == "244 + 20 rows"
    assert said["labels"]["value"] == "2 classes: ants, bees"


def test_images_without_a_fixed_size_can_only_be_left_as_they_are(photos: Path, finetune: Command) -> None:
    says = {"image_processor_type": "ViTImageProcessor", "size": {"longest_edge": 16}, "do_resize": False}
    (photos / "vit" / "preprocessor_config.json").write_text(json.dumps(says), encoding="utf-8")
    ended = finetune("my.yaml")
    assert ended.code == 2
    assert ended.err.startswith("hf-mps: the model's image processor names no fixed size ({'longest_edge': 16")
    assert ended.err.endswith("so images cannot be cropped to it; next: augmentation=null\n")
    for file in (photos / "photos").rglob("*.png"):  # as the model takes them: nothing is left to bring to a size
        picture("red", 0).crop((0, 0, 16, 16)).save(file)
    assert finetune("my.yaml", "augmentation=null", "training.max_steps=1").code == 0
