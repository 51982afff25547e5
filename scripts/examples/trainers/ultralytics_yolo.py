"""Ultralytics: YOLO11n from its YAML, detect or segment, trained on eight drawn squares."""

import sys
import tempfile
from pathlib import Path

import numpy
from PIL import Image
from ultralytics import YOLO

segments = len(sys.argv) > 2
with tempfile.TemporaryDirectory() as place:
    folder, draws = Path(place), numpy.random.default_rng(0)
    for kind in ("images", "labels"):
        (folder / kind).mkdir()
    for number in range(8):
        picture, (left, top) = numpy.zeros((64, 64, 3), "uint8"), draws.integers(0, 32, 2)
        picture[top : top + 32, left : left + 32] = 255
        Image.fromarray(picture).save(folder / f"images/{number}.png")
        x, y, half = (left + 16) / 64, (top + 16) / 64, 0.25
        box = [x, y, 0.5, 0.5]
        outline = [x - half, y - half, x + half, y - half, x + half, y + half, x - half, y + half]
        (folder / f"labels/{number}.txt").write_text(" ".join(map(str, [0, *(outline if segments else box)])))
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images\nval: images\nnames: [square]\n")
    model, losses = YOLO("yolo11n-seg.yaml" if segments else "yolo11n.yaml"), []
    model.add_callback("on_train_batch_end", lambda trainer: losses.append(trainer.loss.item()))
    model.train(
        data=str(folder / "data.yaml"), epochs=6, imgsz=64, batch=8, nbs=8, workers=0, seed=0, device=sys.argv[1],
        project=place, optimizer="AdamW", lr0=1e-3, warmup_epochs=0, amp=False, plots=False, val=False, verbose=False,
        mosaic=0, hsv_h=0, hsv_s=0, hsv_v=0, translate=0, scale=0, fliplr=0, auto_augment=None, erasing=0,
    )  # fmt: skip
print("losses", losses)
