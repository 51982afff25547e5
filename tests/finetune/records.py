"""The record of a run that went well, for what is written of it: results.json, the model card, the picture."""

from __future__ import annotations

import math
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.finetune.report import Expectation, RunRecord
from hf_mps.metrics import Baseline


def history(steps: int = 60) -> list[dict[str, Any]]:
    """What Trainer and StepLines leave of three epochs with an evaluation at the end of each."""
    entries: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        entries.append(
            {
                "loss": 0.7 - 0.3 * step / steps + 0.05 * math.sin(step),
                "grad_norm": 2.0 + math.cos(step),
                "learning_rate": 2e-5 * (1 - step / steps),
                "samples_per_second": 40.0,
                "memory_bytes": 2**30,
                "peak_memory_bytes": 2**31,
                "epoch": 3 * step / steps,
                "step": step,
            }
        )
        if step % (steps // 3) == 0:
            score = 0.8 + 0.03 * step / steps
            entries.append(
                {"eval_loss": 0.5, "eval_f1": score, "eval_accuracy": score - 0.1, "eval_runtime": 3.0, "step": step}
            )
    return [*entries, {"train_runtime": 9.0, "train_loss": 0.5, "step": steps}]


def a_record(**changes: Any) -> RunRecord:
    given: dict[str, Any] = {
        "name": "glue/mrpc",
        "recipe": {"model": "google-bert/bert-base-cased", "training": {"learning_rate": 2e-5, "seed": 42}},
        "device": Choice("mps", "Metal answered the probe"),
        "choices": {"precision": Choice("float32", "bf16 | fp16 are emulated"), "batch": Choice(32, "the recipe's")},
        "metrics": {"f1": 0.8821, "accuracy": 0.8431, "loss": 0.41},
        "main_metric": "f1",
        "log_history": history(),
        "train_seconds": 192.3,
        "samples_per_second": 57.24,
        "baseline": Baseline(
            "always answers 1, the label of 67.4% of the training rows", {"f1": 0.81, "accuracy": 0.68}
        ),
        "peak_memory": 2_085_000_000,
        "expectation": Expectation("f1", 0.85, None, True),
        "model": "google-bert/bert-base-cased",
        "dataset": "nyu-mll/glue",
        "dataset_config": "mrpc",
        "pipeline_tag": "text-classification",
    }
    return RunRecord(**(given | changes))
