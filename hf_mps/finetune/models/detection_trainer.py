"""transformers' Trainer for detectors: an evaluation keeps the boxes and scores of each image alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from transformers import Trainer
from transformers.loss import loss_for_object_detection

from hf_mps.distributed.world import World
from hf_mps.metrics import boxes

NOTHING = -1.0
"""The label of the rows that fill a batch's tensors up."""


class DetectionTrainer(Trainer):  # type: ignore[misc]
    """Trainer whose predictions are (B, MOST, 6) of label, score and box, and whose labels are (B, n, 5) of label and
    box: corners as shares of the image's width and height, rows of NOTHING at the end.
    """

    def compute_loss(self, *arguments: Any, **settings: Any) -> Any:
        with counted_once(lambda stock: partial(stock, reduction="sum")):
            return super().compute_loss(*arguments, **settings)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Return the batch's loss (None without labels), its predictions and its labels."""
        inputs = self._prepare_inputs(inputs)
        processes = self.args.world_size
        alone = counted_once(lambda _: lambda own: own * processes)  # each batch's loss is over its own boxes
        with torch.no_grad(), self.compute_loss_context_manager(), alone:
            outputs = model(**inputs)
        loss = outputs.loss.detach() if "labels" in inputs else None
        if prediction_loss_only:
            return loss, None, None
        found = self.processing_class.post_process_object_detection(outputs, threshold=0.0)
        answers = []
        for one in found:  # the best first
            scores, order = one["scores"].float().sort(descending=True, stable=True)
            scores, order = scores[: boxes.MOST], order[: boxes.MOST]
            columns = [one["labels"][order].float()[:, None], scores[:, None], one["boxes"][order].float()]
            answers.append(torch.cat(columns, dim=1))
        truths = []
        for one in inputs.get("labels", ()):
            centre, size = one["boxes"].float().split(2, dim=1)
            columns = [one["class_labels"].float()[:, None], centre - size / 2, centre + size / 2]
            truths.append(torch.cat(columns, dim=1))
        return loss, _filled(answers, boxes.MOST), _filled(truths) if "labels" in inputs else None


def counted_once(counting: Any) -> AbstractContextManager[Any]:
    """Let transformers' loss sum its boxes over processes by `counting(stock)` before it divides by their number.

    Of one process nothing is replaced. There is no public hook: the loss makes its own criterion and calls a global.
    Its own call takes accelerate's default, the mean, which it divides once more (loss/loss_for_object_detection.py of
    transformers 5.23, `num_boxes`): with two processes boxes would weigh twice as much beside classes.
    """
    if World.here().alone:
        return nullcontext()
    return patch.object(loss_for_object_detection, "reduce", counting(loss_for_object_detection.reduce))


def _filled(rows: list[Any], least: int = 1) -> Any:
    """Return tensors of n rows each as one, filled up with NOTHING to the longest, and to `least` rows."""
    most = max(least, *map(len, rows))
    return torch.stack([torch.nn.functional.pad(one, (0, 0, 0, most - len(one)), value=NOTHING) for one in rows])


def unfilled(rows: Any) -> list[Any]:
    """Return each image's rows of an array without those that fill it up (Trainer fills with -100)."""
    return [one[one[:, 0] >= 0] for one in rows]
