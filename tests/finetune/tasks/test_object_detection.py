"""Object detection: boxes in every usual shape, learned and measured, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_mps.cli.main import main
from hf_mps.core import notices
from tests.finetune import builders, senses, tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command
from tests.refusals import refusal

pytestmark = pytest.mark.usefixtures("own_cache")

NAMES = list(senses.THINGS)
RECIPE = (
    senses.BOXES
    + """\
threshold: 0.3
seed: 1
training:
  per_device_train_batch_size: 8
  learning_rate: 4e-3
  warmup_steps: 8
  max_grad_norm: 0.5
  max_steps: 80
  logging_steps: 40
  eval_strategy: 'no'
  save_strategy: 'no'
"""
)


@pytest.fixture(scope="module")
def yolos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return senses.yolos(tmp_path_factory.mktemp("models") / "yolos")


@pytest.fixture
def scenes(desk: Path, yolos: Path) -> Path:
    """The desk with a tiny YOLOS, 48 scenes to learn from and 8 others."""
    shutil.copytree(yolos, desk / "yolos")
    for name, numbers in (("train", range(48)), ("dev", range(48, 56))):
        tiny.write_jsonl(desk / f"{name}.jsonl", [senses.boxed(desk, number) for number in numbers])
    (desk / "my.yaml").write_text(RECIPE, encoding="utf-8")
    return desk


@pytest.mark.usefixtures("rendered")
def test_it_learns_boxes_on_mps_and_the_saved_model_answers(
    scenes: Path, finetune: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    """map_50 on other scenes is above 0.8: finding nothing has 0, and boxes in the right place of either colour 0.5."""
    finetune("my.yaml").finished()
    said = results(scenes / "runs/my")
    assert said["device"]["value"] == "mps"
    assert said["fallback"] == []
    assert said["metrics"]["map_50"] > 0.8
    assert said["baseline"]["metrics"]["map_50"] == 0
    assert said["pictures"] == ["boxes.png"]
    assert "![Boxes](boxes.png)" in (scenes / "runs/my/README.md").read_text(encoding="utf-8")
    assert (scenes / "runs/my/boxes.png").read_bytes().startswith(b"\x89PNG")
    lines = predictions(scenes / "runs/my")
    assert [line["image"] for line in lines] == [f"{number}.png" for number in range(48, 56)]
    best = [json.loads(line["prediction"])[:1] for line in lines]
    assert sum([one["label"] for one in some] == [NAMES[number % 2]] for number, some in enumerate(best)) >= 7
    for one in best[0]:
        assert set(one) == {"label", "score", "box"}
        assert 0 <= one["box"]["xmin"] < one["box"]["xmax"] <= senses.BOXED[0]
        assert 0 <= one["box"]["ymin"] < one["box"]["ymax"] <= senses.BOXED[1]

    tiny.write_csv(scenes / "new.csv", [{"image": "48.png"}, {"image": "49.png"}])
    capfd.readouterr()
    assert main(["predict", "runs/my", "new.csv", "--format", "jsonl"]) == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["prediction"] for row in found] == [json.loads(line["prediction"]) for line in lines[:2]]


def test_one_class_is_enough_for_boxes(scenes: Path, finetune: Command, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("train", "dev"):
        rows = [json.loads(line) for line in (scenes / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        made = [{**row, "objects": [{**one, "category": 0} for one in row["objects"]]} for row in rows]
        tiny.write_jsonl(scenes / f"{name}.jsonl", made)
    finetune("my.yaml", "data.labels=[thing]", "training.max_steps=2", "threshold=0").finished()
    tiny.write_csv(scenes / "new.csv", [{"image": "48.png"}])
    assert main(["predict", "runs/my", "new.csv", "--format", "jsonl"]) == 0
    (line,) = capfd.readouterr().out.splitlines()[-1:]
    assert {one["label"] for one in json.loads(line)["prediction"]} == {"thing"}
    assert (
        finetune("my.yaml", "data.labels=[]", "output_dir=other").refused()
        == "command line: data.labels names 0; allowed: 1 or more"
    )


def prepare(folder: Path, yolos: Path, rows: list[dict[str, Any]], **values: Any) -> Any:
    file = str(tiny.write_jsonl(folder / "rows.jsonl", rows))
    data = {"files": {"train": file, "validation": file}, "labels": NAMES}
    return builders.prepare(
        task="object-detection", model=str(yolos), **{"data": data, "image_size": 32, "flip": 0.0, **values}
    )


def test_every_usual_shape_of_objects_is_read_alike_and_boxes_are_shares_of_the_image(
    tmp_path: Path, yolos: Path
) -> None:
    row = senses.boxed(tmp_path, 0)
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
        (
            [{"bbox": [1, 2, 3], "category": 0}],
            "row 1 has a box [1, 2, 3]; allowed: four finite numbers, xywh in pixels",
        ),
        (
            [{"bbox": [float("nan"), 2, 3, 4], "category": 0}],
            "row 1 has a box [nan, 2.0, 3.0, 4.0]; allowed: four finite numbers, xywh in pixels",
        ),
        (
            [{"bbox": [1, 2, float("inf"), 4], "category": 0}],
            "row 1 has a box [1.0, 2.0, inf, 4.0]; allowed: four finite numbers, xywh in pixels",
        ),
        ([{"bbox": [1, 2, 3, 4], "category": 2}], "row 1 has an object of class 2; allowed: 0 to 1, or a name"),
        ([{"bbox": [1, 2, 3, 4], "category": "rde"}], "has an object of class 'rde'; allowed: 0 to 1, or a name"),
        ([{"bbox": [1, 2, 3, 4]}], "row 1 has an object without category (bbox); allowed: category, category_id"),
        ([{"bbox": [9, 2, 3, 4], "category": 0}], "ends before it begins; next: box_format=xywh, or another box"),
        ([{"bbox": [0.1, 0.2, 0.3, 1], "category": 0}], "such as [0.1, 0.2, 0.3, 1.0]: they are shares of the image"),
        ([], "no row has an object; allowed: one in some rows at least"),
    ],
)
def test_objects_that_cannot_be_learned_are_refused(tmp_path: Path, yolos: Path, objects: Any, problem: str) -> None:
    form = "xyxy" if "=xywh, or" in problem else "xywh"
    assert problem in refusal(
        prepare, tmp_path, yolos, [{**senses.boxed(tmp_path, 0), "objects": objects}], box_format=form
    )


def test_boxes_of_no_area_are_left_out_and_told_once(tmp_path: Path, yolos: Path) -> None:
    rows = [senses.boxed(tmp_path, number) for number in range(4)]
    count = sum(len(row["objects"]) for row in rows)
    for number in (1, 2):
        rows[number]["objects"] += [{"bbox": [3, 4, 0, 5], "category": 0}, {"bbox": [3, 4, 5, 0], "category": 0}]
    heard: list[str] = []
    notices.forget()
    with notices.redirected(heard.append):
        made = prepare(tmp_path, yolos, rows)
    (line,) = [each for each in heard if "area" in each]
    assert line.startswith(f"4 of {count + 4} boxes have no area and are left out, the first at ")
    assert f"row 2 ({rows[1]['image']})" in line
    assert made.choices["objects"].value.startswith(f"{count} in ")
